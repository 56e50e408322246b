"""Why llama.cpp parts from the truth: the faults that were read in its source, and which signatures each of them gives.

Rules
- A fault is one place in the source of the version that is named here; its sentence says what the caller did, what the engine answered and what is wrong.
- A signature stands under the one fault that its reduced programs show. One that is not listed has no analysis, and nobody guesses one.
- The policy `llamacpp` (impl/llamacpp/) has the faults of the memory rebuilt and answers alike, but for cancel and for device saves. No build of llama.cpp with one of them mended was made.
Source: src/ of the llama.cpp that llama-cpp-python 0.3.36 brings.
"""

from typing import NamedTuple


class Cause(NamedTuple):
    """One fault: where it stands in the source, what happens, and the signatures (words without target and family) that it gives."""

    place: str
    told: str
    signatures: tuple[str, ...]


CAUSES = (
    Cause(
        "llama_memory_recurrent::seq_rm, rollback",
        "The caller takes tokens back after a batch that left fewer snapshots than that, and the engine says yes: it asks only whether the number is within `n_rs_seq`, "
        "never which planes the last ubatch wrote, so that the next decode reads an older batch's plane, or zeros",
        (
            "wrong-output at decode (self) after decode+rollback",
            "wrong-output at decode (self) after decode-coupled+rollback",
            "wrong-output at decode (self) after decode+restore+rollback+save",
            "wrong-output at decode (self) after decode+restore_all+rollback+save_all",
        ),
    ),
    Cause(
        "llama_memory_recurrent::seq_rm, position of the cell",
        "The caller takes tokens of one sequence back, and the engine says yes: it lowers the position of the cell, which every sequence that shares it has, too, "
        "so that the others are cut in their recurrent half and keep the tokens in their attention half",
        (
            "wrong-position at rollback (other) after decode+share",
            "wrong-position at rollback (other) after decode-coupled",
            "wrong-position at remove (other) after decode+share",
            "wrong-position at remove (other) after decode-coupled",
        ),
    ),
    Cause(
        "llama_memory_recurrent::seq_cp",
        "The caller copies a sequence whose rollback is still pending, which nothing refuses: the copy is given the cell but not the source's rollback index, so that it goes on from the state before the rollback",
        ("wrong-output at decode (self) after decode+rollback+share",),
    ),
    Cause(
        "llama_memory_recurrent::seq_rm, range with a last position",
        "The caller removes all of a sequence by a range that has a last position, and the engine says yes: the rollback index is reset only for the open range, "
        "so that the sequence's next first token reads a snapshot instead of a state of zeros",
        ("wrong-output at decode (self) after decode+remove+rollback",),
    ),
    Cause(
        "llama_memory_recurrent::seq_rm, middle range",
        "The caller removes a range that ends before the last token, and the engine says yes: the cell's position lies outside of the range, nothing is done, and true is what is left to return",
        ("false-success at remove (self) after decode", "false-success at remove (self) after decode+shift"),
    ),
    Cause(
        "llama_memory_recurrent::seq_rm, first position",
        "The caller removes all tokens of a sequence that was shifted, by a range that begins at its first one: the recurrent memory knows the last position only, takes the range for a rollback of as many tokens as "
        "lie before it, and refuses, or takes back where nothing should be left",
        ("bad-refusal at remove (self) after decode+shift", "wrong-position at remove (self) after decode+shift"),
    ),
    Cause(
        "llama_kv_cache::seq_keep",
        "The caller keeps one sequence, which cannot be refused: with separate pools only the pool of that sequence is cleared, and the others keep their tokens in the attention half after losing their state",
        ("wrong-position at keep (other) after decode", "wrong-position at keep (other) after decode+share"),
    ),
    Cause(
        "llama_kv_cache::state_read, empty streams",
        "The caller restores an empty sequence over one with tokens, and the engine says yes: the attention half skips a stream that was saved empty without removing what is there, while the recurrent half removes it",
        ("wrong-position at restore (self) after decode+save",),
    ),
    Cause(
        "llama_memory_recurrent::state_read_meta and llama_kv_cache::state_read_meta",
        "The caller restores what is damaged, of another model or of more sequences than there is room for, and the engine says no: each half has removed its destination before it reads on, so that a refusal loses the sequence, "
        "or leaves one half of it",
        (
            "partial-effect at restore (self) after damage-foreign+decode+save",
            "partial-effect at restore (self) after damage-flip+decode+save",
            "partial-effect at restore (self) after damage-truncate+decode+save",
            "partial-effect at restore (self) after damage-header+decode+save",
            "partial-effect at restore (self) after damage-truncate+decode+save-partial",
            "partial-effect at restore (self) after damage-flip+decode+save-partial",
            "partial-effect at restore (self) after damage-foreign+decode+save-partial",
            "partial-effect at restore_all (self) after decode+reopen+save_all",
        ),
    ),
    Cause(
        "llama_context::state_seq_set_data",
        "The caller restores a device save with a damaged header: the first look at it stands before the try block that the others stand in, and an exception leaves the C interface",
        (
            "crash at restore [what() wrong sequence state magic] (self) after damage-header+save-device",
            "crash at restore [what() wrong sequence state magic] (self) after damage-flip+save-device",
        ),
    ),
    Cause(
        "llama_context::decode, after an aborted ubatch",
        "The caller's abort callback ends a decode, which is answered with 2: the ubatch's tokens are removed by seq_rm, which the recurrent memory takes for a rollback into planes that the aborted graph never wrote "
        "(or refuses, which nobody reads)",
        ("wrong-output at decode (self) after cancel+decode", "wrong-position at cancel (self)", "wrong-output at decode (self) after cancel"),
    ),
    Cause(
        "llama_memory_recurrent::state_write",
        "The caller saves everything while sequences that share a cell have different rollbacks pending: GGML_ABORT stands where each sequence's own state could be written, and the process dies",
        (
            "crash at save_all [llama.cpp aborted llama-memory-recurrent.cpp cannot write shared recurrent state] (self) after decode+rollback+share",
            "crash at save_all [llama.cpp aborted llama-memory-recurrent.cpp cannot write shared recurrent state] (self) after decode-coupled+rollback",
        ),
    ),
    Cause(
        "llama_batch_allocr::split_seq",
        "The caller asks for hidden states and decodes a token of two sequences and then one of the first alone, which is accepted: the second token is added to the ubatch of both because its sequences are a subset, "
        "and the state that both share takes it in",
        ("wrong-position at decode (self)", "wrong-output at decode (other) after decode-coupled"),
    ),
    Cause(
        "llama_kv_cache::seq_cp between streams",
        "The caller copies a sequence to another pool and restores something over the source, and both are accepted: the copy of keys and values waits for the next decode and then copies what was restored",
        ("wrong-output at decode (other) after decode+drop+restore+save+share", "wrong-output at decode (other) after decode+restore+save+share"),
    ),
    Cause(
        "llama_kv_cache::state_write after seq_add",
        "The caller shifts a sequence and saves everything before the next decode, and both are accepted: the saved positions are shifted, the saved keys are not, "
        "because they are rotated only by the next decode, and the restored session never rotates them",
        ("wrong-output at decode (self) after decode+restore_all+save_all+shift", "wrong-output at decode (self) after decode+restore+save+shift"),
    ),
    Cause(
        "llama_kv_cache_iswa, seq_add and seq_div",
        "The caller shifts or divides a sequence of a model whose attention layers all have a window, which cannot be refused: the base cache has no layer, and the graph of its shift has no buffer",
        (
            "crash at decode [llama.cpp aborted ggml-backend.cpp GGML_ASSERT(buffer) failed] (self) after decode+shift",
            "crash at decode [llama.cpp aborted ggml-backend.cpp GGML_ASSERT(buffer) failed] (self) after decode+divide",
        ),
    ),
    Cause(
        "llama_memory_recurrent::seq_add and seq_div",
        "The caller moves the positions of one sequence, which cannot be refused: the position that is moved is the cell's, and every sequence that shares it moves along in its recurrent half",
        (
            "wrong-position at shift (other) after decode+share",
            "wrong-position at shift (other) after decode-coupled",
            "wrong-position at divide (other) after decode+share",
            "wrong-position at divide (other) after decode-coupled",
            "wrong-output at decode (other) after decode+decode-coupled+shift",
            "wrong-output at decode (other) after decode-coupled+shift",
            "wrong-output at decode (other) after decode-coupled+divide",
        ),
    ),
    Cause(
        "llama_memory_recurrent::seq_cp, range",
        "The caller copies the first part of a sequence, which cannot be refused: the recurrent half is shared whole, the range is not looked at",
        ("false-success at share (self) after decode", "false-success at share (self) after decode+share"),
    ),
    Cause(
        "llama_kv_cache::seq_cp in one pool",
        "The caller copies a sequence onto one that has tokens, which cannot be refused: the recurrent half drops them first, the attention half of a unified pool keeps them beside the copied ones",
        (
            "wrong-position at share (self) after decode",
            "wrong-output at decode (self) after decode+share",
            "wrong-output at decode (self) after decode+share-range",
        ),
    ),
    Cause(
        "llama_kv_cache::seq_cp between streams, range",
        "The caller copies a part of a sequence to another pool: an assertion takes the process down instead of a refusal",
        ("crash at share [llama.cpp aborted llama-kv-cache.cpp GGML_ASSERT(is_full && seq_cp() is only sup] (self)",),
    ),
    Cause(
        "llama_batch_allocr::split_equal",
        "The caller sets `n_ubatch` no larger than 1 + `n_rs_seq`: no context is refused, and the first decode dies in the assertion that a ubatch has room for the tokens that stay together",
        tuple(
            f"crash at {operation} [llama.cpp aborted llama-batch.cpp GGML_ASSERT(n_ubatch > n_keep_tail) failed] (self)"
            for operation in ("decode", "cancel", "open", "reopen")
        ),
    ),
)  # fmt: skip
"""Memory faults, those of documented uses first."""

CAUSE_OF = {words: cause for cause in CAUSES for words in cause.signatures}
"""By a signature's words."""
