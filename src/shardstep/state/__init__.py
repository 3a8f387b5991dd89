"""The optimizer's state: viewing it, collecting it, and state dicts in every form."""
