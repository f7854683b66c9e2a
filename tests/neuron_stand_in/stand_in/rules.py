"""The error of a caller that breaks a rule which the real packages don't check themselves."""


class RuleBroken(Exception):
    """Raised where the real package would go on and compute or store something wrong.

    No subclass of RuntimeError: nobody who handles a device's errors may catch it by mistake.
    """
