"""Pipeline parallelism: a schedule is a table, and one engine runs every table."""
