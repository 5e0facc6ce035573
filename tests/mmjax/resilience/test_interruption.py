import os
import signal

import pytest

from mmjax.resilience.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_the_second_stops_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.is_requested
        os.kill(os.getpid(), number)
        assert interruption.is_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_one_process_of_several_hands_ctrl_c_on_as_sigterm_which_stops_all_at_one_step() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with Interruption(handles_sigterm=False) as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert received == [signal.SIGTERM] and not interruption.is_requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
