"""A program with a model on two ranks: prints the process id of rank 1, generates for ever, and prints how it ends.

With an argument, the ranks divide attention by request.
"""

import sys

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner


def main() -> None:
    with LLM(tensor_parallel_size=2, num_threads=2, max_running=4, enable_dp_attention=len(sys.argv) > 1) as llm:
        runner = llm._engine._engine.runner  # pyright: ignore[reportPrivateUsage]
        assert isinstance(runner, RankedRunner)
        group = runner._group  # pyright: ignore[reportPrivateUsage]
        assert isinstance(group, Group)
        print(*group.pids(), flush=True)
        try:
            while True:
                llm.generate(["one", "two"], SamplingParams(max_tokens=100, ignore_eos=True))
        except RunnerLostError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
