"""`python -m ddp_lab`: the main job of the course in a terminal, launched as from a notebook."""

import argparse
import sys

from ddp_lab import diagnosis, launcher
from ddp_lab import train as train_function
from ddp_lab.data import prepare_data
from ddp_lab.train import add_options, check_options, report, report_all


def main() -> int:
    """Launch `train` on this machine; return 0, or 1 after a one-sentence error."""
    parser = argparse.ArgumentParser(prog="python -m ddp_lab", description="Train on MNIST with several ranks")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks")
    parser.add_argument("--full-data", action="store_true", help="download and use all 60,000 images")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank may wait in one collective")
    add_options(parser)
    options = vars(parser.parse_args())
    launch_options = {name: options.pop(name) for name in ("world_size", "timeout")}
    try:
        check_options(options["model"], options["epochs"], options["per_rank_batch_size"])
        if options.pop("full_data"):
            options["data_root"] = prepare_data(full=True)
        run = launcher.launch(train_function, **launch_options, **options)
    except (ValueError, diagnosis.RankError) as error:
        print(*[error, *getattr(error, "details", [])], sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(interrupt, file=sys.stderr)
        return 130
    for rank, result in enumerate(run.results):
        report(rank, result)
    report_all(run.results[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
