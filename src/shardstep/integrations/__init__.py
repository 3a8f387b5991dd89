"""A few lines for each framework: import the module with the framework's name. Nothing else imports it."""
