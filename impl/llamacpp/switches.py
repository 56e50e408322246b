"""Where real builds of llama.cpp differ, as switches of the policy.

Rules
- One switch is one observable difference; its default is what llama-cpp-python 0.3.36 does.
- targets/llama_probe.py asks an engine which it is.
"""

import msgspec


class Switches(msgspec.Struct, frozen=True):
    """What a build does where builds differ.

    refuses_shared_rollback  False: taking back the tail of a shared cell moves the position of every sharer; True (builds from about 11549):
                             it is refused
    """

    refuses_shared_rollback: bool = False
