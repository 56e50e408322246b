"""What every repro.py for llama.cpp begins and ends with: a tiny model with random weights, a context, a decode.

Rules
- This file is copied as text into a script that runs without statedrift: it imports nothing of it, only llama-cpp-python, gguf and NumPy.
- A script gets the imports, then its own calls, then those functions of this file that it needs.
- It is short, because people read it before they trust it.
"""

# --- imports ---
import ctypes
import hashlib
import os
import sys
import tempfile

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

try:
    import gguf
    import llama_cpp.llama_cpp as llama
    import numpy as np
except ImportError as error:
    print(f"could not run: {error}", file=sys.stderr)
    sys.exit(2)

silent = llama.llama_log_callback(lambda level, text, data: None)  # kept: the library goes on calling it
if "--verbose" not in sys.argv:
    llama.llama_log_set(silent, None)

# --- functions ---


def write_model(path, metadata, tensors, seed_words):
    """Write a GGUF file: every tensor is drawn from a generator keyed by the family, the seed and the tensor's name."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    writer.add_tokenizer_model("none")
    for name, key, drawn_shape, draw, scale, offset, shape, transform in tensors:
        digest = hashlib.blake2b(f"{seed_words},{key}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        sample = random.standard_normal(drawn_shape) if draw == "normal" else random.random(drawn_shape)
        values = (offset + scale * sample).astype(np.float32)
        if transform == "negative exponential":
            values = (-np.exp(values.astype(np.float64))).astype(np.float32)
        writer.add_tensor(name, np.ascontiguousarray(values.reshape(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_model(metadata, tensors, seed_words):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_model(path, metadata, tensors, seed_words)
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.load_mode = 0  # read, not mapped: the file is gone afterwards
        model = llama.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise RuntimeError("the library does not load the model; --verbose shows why")
    return model


def open_context(model, **changes):
    """A context on one thread, with float32 attention cells, an own stream a sequence and no flash attention unless `changes` say otherwise."""
    parameters = llama.llama_context_default_params()
    parameters.n_batch = 4096
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.pooling_type = 0
    parameters.type_k = parameters.type_v = 0
    parameters.flash_attn_type = 0
    parameters.kv_unified = parameters.swa_full = False
    parameters.offload_kqv = parameters.op_offload = False
    for name, value in changes.items():
        setattr(parameters, name, value)
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("the library does not open the context; --verbose shows why")
    return context


def decode(context, items, embeddings=False, last_only=False, cancel_at=None):
    """One batch of (sequences, first position, tokens); returns llama_decode's code and the rows, one for each token."""
    entries = [(token, start + index, owners) for owners, start, tokens in items for index, token in enumerate(tokens)]
    newest = {sequence: number for number, (_, _, owners) in enumerate(entries) for sequence in owners}
    batch = llama.llama_batch_init(len(entries), 0, max(len(owners) for _, _, owners in entries))
    batch.n_tokens = len(entries)
    for number, (token, position, owners) in enumerate(entries):
        batch.token[number], batch.pos[number], batch.n_seq_id[number] = token, position, len(owners)
        for place, sequence in enumerate(owners):
            batch.seq_id[number][place] = sequence
        batch.logits[number] = embeddings or not last_only or number in newest.values()
    llama.llama_set_embeddings(context, embeddings)
    chances = iter(range(cancel_at or 0))  # the library asks before every node of its graph whether to go on
    callback = llama.ggml_abort_callback(lambda data: cancel_at is not None and next(chances, None) is None)
    llama.llama_set_abort_callback(context, callback, None)
    code = llama.llama_decode(context, batch)
    llama.llama_set_abort_callback(context, llama.ggml_abort_callback(), None)
    model = llama.llama_get_model(context)
    width = llama.llama_model_n_embd(model) if embeddings else llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    row_of = llama.llama_get_embeddings_ith if embeddings else llama.llama_get_logits_ith
    wanted = [number for number in range(len(entries)) if batch.logits[number]] if code == 0 else []
    rows = {number: np.ctypeslib.as_array(row_of(context, number), (width,)).copy() for number in wanted}
    llama.llama_batch_free(batch)
    return code, rows


def save(context, sequence, flags=0):
    size = llama.llama_state_seq_get_size_ext(context, sequence, flags)
    data = (ctypes.c_uint8 * size)()
    written = llama.llama_state_seq_get_data_ext(context, data, size, sequence, flags)
    return bytes(data[:written])


def save_all(context):
    size = llama.llama_state_get_size(context)
    data = (ctypes.c_uint8 * size)()
    written = llama.llama_state_get_data(context, data, size)
    return bytes(data[:written])


def restore(context, data, sequence, flags=0):
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return llama.llama_state_seq_set_data_ext(context, buffer, len(data), sequence, flags)


def restore_all(context, data):
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return llama.llama_state_set_data(context, buffer, len(data))


def positions(context, count):
    """First and last position of every sequence, (-1, -1) when empty."""
    memory = llama.llama_get_memory(context)
    first, last = llama.llama_memory_seq_pos_min, llama.llama_memory_seq_pos_max
    return [(first(memory, sequence), last(memory, sequence)) for sequence in range(count)]
