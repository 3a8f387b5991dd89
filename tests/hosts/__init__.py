"""Several hosts, for real: see ``namespaces``. Run by ``make test-hosts``."""
