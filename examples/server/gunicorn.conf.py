"""Settings of gunicorn for the example: ``gunicorn app:application`` in this folder."""

bind = "127.0.0.1:8000"
workers = 4
# Not needed to share memory: every worker maps the same pages. It only saves their start-up time.
preload_app = False
