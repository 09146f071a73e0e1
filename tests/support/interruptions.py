"""Ctrl+C at chosen moments."""

import contextlib
import signal


def interrupted(act, delays):
    """Calls `act` once for each delay, in seconds, after which it is interrupted.

    Yields whether a `KeyboardInterrupt` came before its end.
    """
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in delays:
            came = True
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, delay)
                act()
                signal.setitimer(signal.ITIMER_REAL, 0)
                came = False
            yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
