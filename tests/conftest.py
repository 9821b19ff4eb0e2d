"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Let processes that tests start heed SIGINT and SIGQUIT, which a shell has its background jobs ignore."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
