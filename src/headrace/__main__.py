"""``python -m headrace``, and the ``headrace`` command."""

import sys


def main() -> None:
    """Run the command line; without typer or rich one line says what to install."""
    try:
        from headrace.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"error: the command needs {package}, which is not installed: pip install 'headrace[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
