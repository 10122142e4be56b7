"""Authenticated connections between the processes of a job, and what the launcher and its workers
share: places, messages, environment variables and exit statuses. Needs no JAX.
"""
