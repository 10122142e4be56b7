"""How the processes of a job find each other and talk, proven by its secret. Needs no JAX."""
