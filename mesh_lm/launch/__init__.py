"""The launcher, `python -m mesh_lm.launch`: starts the processes of a run, watches over them and starts them again. Needs no JAX.

What the processes themselves do together is `mesh_lm.distributed`. Here are the statuses with which they end.
"""

EXIT_CANNOT = 1
"""Status of a run that cannot run as it was asked to; starting it again would change nothing."""
EXIT_UNEXPECTED = 70
"""Status after an error that nobody foresaw (EX_SOFTWARE of sysexits.h); its traceback is above."""
EXIT_STALLED = 75
"""Status of a process that its watchdog ended, and of a run whose nodes do not come back (EX_TEMPFAIL)."""
EXIT_FEWER = 76
"""Status of a process whose mesh needs fewer nodes than there are; the launcher starts so many."""
EXIT_PREEMPTED = 99
"""Status of a run that SIGTERM ended: it saved, and the same command continues it."""
