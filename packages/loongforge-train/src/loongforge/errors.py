"""Exceptions of the trainer, each with the process exit code that the command line returns for it."""

from __future__ import annotations


class LoongForgeError(Exception):
    """Base of all errors that a user can act on."""

    exit_code = 1


class ConfigError(LoongForgeError, ValueError):
    """A setting is wrong: the message says what, the actual value, what is allowed, and the way out."""

    exit_code = 2


class MissingPillarError(LoongForgeError, ImportError):
    """A pillar was asked for that is not installed; the message names the package to install."""

    exit_code = 69


class CheckpointError(LoongForgeError):
    """A checkpoint cannot be written, found, read, or does not fit."""

    exit_code = 74


class NonFiniteError(LoongForgeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""

    exit_code = 65


class SpikeError(LoongForgeError):
    """The loss rose far above its recent values and the policy is to stop."""

    exit_code = 65


class DataExhaustedError(LoongForgeError):
    """The loader yields no batch at all, so no optimizer step could ever happen."""

    exit_code = 66


class HungStepError(LoongForgeError):
    """No step finished within the watchdog's limit."""

    exit_code = 75


class AgreementError(LoongForgeError):
    """The ranks disagree about something they must agree on."""

    exit_code = 76


class ControlError(LoongForgeError):
    """A live process cannot be reached or refused the request."""

    exit_code = 69


def require(module: str, package: str, extra_help: str = "") -> object:
    """Import ``module`` or raise :class:`MissingPillarError` naming the ``package`` to install.

    Args:
        module: Dotted module name.
        package: Distribution that provides it, as pip knows it.
        extra_help: What to switch off instead, appended to the message.

    Returns:
        The imported module.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        root = module.split(".", 1)[0]
        if error.name is not None and error.name.split(".", 1)[0] != root:
            raise
        hint = f", or {extra_help}" if extra_help else ""
        message = f"{module} is not installed: run `pip install {package}`{hint}"
        raise MissingPillarError(message) from error
