"""Exit statuses of the project's commands, by which the launcher decides what comes next."""

EXIT_CANNOT = 1
"""Status of a run that cannot start as configured; a restart would not help."""
EXIT_USAGE = 2
"""Status of Python where there is no such script, and of a command with options that it does not
have: as EXIT_CANNOT."""
EXIT_UNEXPECTED = 70
"""Status after an unexpected error (EX_SOFTWARE of sysexits.h), whose traceback was printed."""
EXIT_STALLED = 75
"""Status of a process that its watchdog ended or whose disk failed, and of a run whose nodes do not
reconnect (EX_TEMPFAIL)."""
EXIT_FEWER = 76
"""Status of a process whose mesh needs fewer nodes than there are; the launcher restarts on that
many."""
EXIT_REPLACED = 77
"""Status of process 0 if another run has taken its output over. The launcher does not restart it,
and itself ends with EXIT_CANNOT."""
EXIT_PREEMPTED = 99
"""Status of a run that SIGTERM ended: it saved a checkpoint, and the same command continues it."""
EXIT_INTERRUPTED = 130
"""Status of a command that Ctrl-C ended, as shells have it; a run saved a checkpoint, and the same
command continues it."""
