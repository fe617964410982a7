"""Usual mistakes in chapter 6: {exercise: [(name, what to tell who made it, {words of the solution: wrong words})]}."""

WRONG = {
    "6.1": [
        ("tail_after_silu", "the next chunk is convolved with inputs, not with what came out",
         {"inputs[stop : stop + len(tail)].clone()":
          "torch.cat([tail, mixed * torch.sigmoid(mixed)])[stop : stop + len(tail)]"}),
        ("short_chunk_drops_the_tail", "of a chunk shorter than the tail, some of the old tail is still in the new one",
         {"inputs[stop : stop + len(tail)].clone()":
          "torch.cat([torch.zeros_like(tail), x])[stop : stop + len(tail)]"}),
        ("kernel_flipped", "the first weight is the oldest input's", {"weight[:, j]": "weight[:, -1 - j]"}),
        ("tail_of_the_whole_chunk", "who goes on from inside the chunk must not find inputs that came later",
         {"inputs[stop : stop + len(tail)]": "inputs[len(x) : len(x) + len(tail)]"}),
        ("tail_one_token_early", "after `stop` tokens, the last input in the tail is that of token stop - 1",
         {"inputs[stop : stop + len(tail)]": "inputs[max(stop - 1, 0) :][: len(tail)]"}),
        ("every_chunk_a_beginning", "the chunk's first tokens look back into the old tail",
         {"mixed + weight[:, j] * inputs[j : j + len(x)]":
          "mixed + weight[:, j] * torch.cat([torch.zeros_like(tail), x])[j : j + len(x)]"}),
        ("no_silu", "the output is y x sigmoid(y)", {"mixed * torch.sigmoid(mixed), tails": "mixed, tails"}),
    ],
    "6.2": [
        ("snapshot_is_an_alias", "a second name for a slot is no copy: the next write changes both",
         {"kept = self.take()": "kept = slot if self._free else None"}),
        ("keeps_the_callers_tensors", "the caller's next step changes its tensors, and with them what you kept",
         {"(state.clone(), tail.clone(), num_tokens)": "(state, tail, num_tokens)"}),
        ("keeps_the_callers_tail", "the tail changes with the caller's next step as the matrices do",
         {"(state.clone(), tail.clone(), num_tokens)": "(state.clone(), tail, num_tokens)"}),
        ("no_stamp", "a state of another position looks like any other: only its stamp can tell",
         {"num_seen != num_tokens": 'num_seen == "no"'}),
        ("accepts_an_older_state", "a state that has seen less lacks tokens: it is as wrong as a later one",
         {"num_seen != num_tokens": 'num_seen == "no" or num_seen > num_tokens'}),
        ("snapshot_without_its_stamp", "a snapshot has seen as many tokens as what it was made of",
         {"self.write(kept, *self._held[slot])": "self.write(kept, *self._held[slot][:2], 0)"}),
        ("snapshot_without_the_tail", "the convolution's tail is part of the state: without it, three tokens go wrong",
         {"self.write(kept, *self._held[slot])":
          "self.write(kept, self._held[slot][0], torch.zeros(self._shapes[1]), self._held[slot][2])"}),
        ("last_holders_state", "who takes a slot begins with zeros, not with what somebody left in it",
         {"(*(torch.zeros(shape) for shape in self._shapes), 0)":
          "(*getattr(self, 'left', [torch.zeros(shape) for shape in self._shapes]), 0)",
          "        del self._held[slot]\n": "        self.left = self._held.pop(slot)[:2]\n"}),
        ("snapshot_of_an_empty_pool", "when no slot is free there is no snapshot, and no error",
         {"        if kept is not None:\n            self.write(kept, *self._held[slot])":
          "        self.write(kept, *self._held[slot])"}),
        ("given_back_twice", "a slot that is free twice will be given to two requests",
         {'        if slot not in self._held:\n            raise ValueError(f"nobody holds slot {slot}")\n'
          "        del self._held[slot]": "        self._held.pop(slot, None)"}),
    ],
    "6.3": [
        ("kv_in_every_layer", "only one layer of each interval keeps keys and values",
         {"kv_bytes_per_token = num_full": "kv_bytes_per_token = model.num_layers"}),
        ("all_layers_linear", "attention layers have no state",
         {"num_linear = model.num_layers - num_full": "num_linear = model.num_layers"}),
        ("state_in_gib", "a GB is 10^9 bytes; 2^30 are a GiB", {"state_bytes / 1e9": "state_bytes / 2**30"}),
        ("bf16_state", "the matrices have a dtype of their own, float32 unless said otherwise",
         {"matrices * state_dtype_bytes": "matrices * kv_dtype_bytes"}),
        ("convolution_left_out", "the convolution's last inputs are kept as well",
         {" + channels * (model.conv_kernel - 1) * 2": ""}),
        ("only_values_convolved", "queries and keys go through the convolution too",
         {"2 * model.num_key_heads * model.key_dim + ": ""}),
        ("keys_and_no_values", "a token leaves a key and a value", {"num_full * 2 *": "num_full *"}),
        ("rounds_down", "that many tokens do not yet reach the state's bytes",
         {"math.ceil(state_bytes / kv_bytes_per_token)": "int(state_bytes // kv_bytes_per_token)"}),
    ],
    "6.4": [
        ("from_A_alone", "the token decides as well, and dt_bias: e^A_log is only a factor",
         {"torch.nn.functional.softplus(a + dt_bias)": "torch.ones_like(a)"}),
        ("log_base_two", "g is a natural logarithm: half is left where n g = -ln 2",
         {"math.log(2) / -g": "1 / -g"}),
        ("mean_for_median", "a few tokens that wipe everything rule the mean",
         {"g.median(dim=0).values": "g.mean(dim=0)"}),
        ("A_log_itself", "A_log is a logarithm", {"-A_log.exp()": "-A_log"}),
        ("bias_left_out", "dt_bias is added to a", {"a + dt_bias": "a"}),
        ("relu_for_softplus", "softplus(0) is log 2, not 0", {"softplus(a + dt_bias)": "relu(a + dt_bias)"}),
        ("time_to_one_eth", "after 1 / -g tokens 1 / e is left, not a half: ln 2 is missing, or squared",
         {"math.log(2) / -g": "math.log(2) ** 2 / -g"}),
    ],
    "6.5": [
        ("gate_from_the_padded_end", "the gate of the last real token leads to the next state; behind it nothing fades",
         {"state[h] = G[-1].exp() * S + ((G[-1] - G)": "pad = G.new_zeros(chunk - len(G))\n            "
          "state[h] = torch.cat([G, pad])[-1].exp() * S + ((torch.cat([G, pad])[-1] - G)"}),
        ("starts_from_zero", "the request remembers something before its first token",
         {"state.clone()\n": "torch.zeros_like(state)\n"}),
        ("every_chunk_from_zero", "a chunk goes on from what the one before it left",
         {"S = g[start : start + chunk, h].cumsum(0), state[h].clone()":
          "S = g[start : start + chunk, h].cumsum(0), state[h].clone() * (start == 0)"}),
        ("every_chunk_from_the_first_state", "a chunk goes on from what the one before it left, not the first",
         {"out, state = torch.empty_like(v), state.clone()":
          "out, state, first = torch.empty_like(v), state.clone(), state", "state[h].clone()": "first[h]"}),
        ("diagonal_in_the_system", "a token's delta is not corrected by itself: j < i",
         {".tril(-1)": ""}),
        ("fades_apart_overflow", "e^G_i and e^-G_j apart: the second is beyond any number where much is forgotten",
         {"(G[:, None] - G).tril().exp().tril()": "(G.exp()[:, None] * (-G).exp()).tril()"}),
        ("exponent_not_masked", "above the diagonal the exponent is positive: infinity times 0 is no number",
         {"(G[:, None] - G).tril().exp().tril()": "(G[:, None] - G).exp() * torch.ones(len(G), len(G)).tril()"}),
        ("sees_later_tokens", "out_i mixes the deltas of j <= i only",
         {"((Q @ K.T) * L) @ delta": "((Q @ K.T) * (G[:, None] - G).clamp(max=0).exp()) @ delta"}),
        ("reads_before_it_writes", "a token reads what it has written itself: j <= i",
         {"((Q @ K.T) * L) @ delta": "((Q @ K.T) * L.tril(-1)) @ delta"}),
        ("values_not_corrected", "the delta is what the state does not say already",
         {"V - G.exp()[:, None] * (K @ S)": "V"}),
        ("state_not_faded_when_read", "token i finds a state that has faded by e^G_i",
         {"V - G.exp()[:, None] * (K @ S)": "V - K @ S"}),
        ("no_deltas_within", "a token corrects what the tokens before it in the chunk have written",
         {"delta = torch.linalg.solve_triangular(A, right, upper=False)": "delta = right"}),
        ("beta_left_out_of_the_system", "beta_i scales the whole correction of token i",
         {"(b[:, None] * (K @ K.T) * L)": "((K @ K.T) * L)"}),
        ("keys_not_faded_to_the_end", "what token j wrote fades until the chunk's end",
         {"((G[-1] - G).exp()[:, None] * K).T @ delta": "K.T @ delta"}),
        ("gates_not_summed", "G is a running sum", {".cumsum(0)": ""}),
    ],
    "6.6": [
        ("uses_a_quarter_of_the_bytes", "there is room for more directions: spend all the bytes",
         {"num_bytes // num_each": "num_bytes // num_each // 4"}),
        ("every_head_alike", "half of the heads remember a token or two: they need a direction or two",
         {"sizes.flatten().topk(min(sizes.numel(), num_bytes // num_each)).indices":
          "(torch.arange(len(sizes))[:, None] * sizes.shape[1]"
          " + torch.arange(min(sizes.shape[1], num_bytes // num_each // len(sizes)))).flatten()"}),
        ("smallest_first", "the largest singular values say most of what there is",
         {"num_bytes // num_each)).indices": "num_bytes // num_each), largest=False).indices"}),
    ],
}  # fmt: skip

# Other ways to be right, which the checks must accept.
ALSO_RIGHT = {
    "6.1": [
        {"mixed = torch.zeros_like(x)\n    for j in range(weight.shape[1]):\n"
         "        mixed = mixed + weight[:, j] * inputs[j : j + len(x)]":
         "mixed = torch.zeros_like(x)\n    for t in range(len(x)):\n"
         "        mixed[t] = (inputs[t : t + weight.shape[1]] * weight.T).sum(0)"},
    ],
    "6.2": [
        {"self._held[slot] = (state.clone(), tail.clone(), num_tokens)":
         "for mine, theirs in zip(self._held[slot][:2], (state, tail)):\n            mine.copy_(theirs)\n"
         "        self._held[slot] = (*self._held[slot][:2], num_tokens)"},
        {"self._free.pop()": "self._free.pop(0)", "self.write(kept, *self._held[slot])":
         "self._held[kept] = self._held[slot]  # nobody writes to a tensor that is kept"},
    ],
    "6.5": [
        {"delta = torch.linalg.solve_triangular(A, right, upper=False)":
         "delta = right.clone()\n            for i in range(len(delta)):\n"
         "                delta[i] = right[i] - A[i, :i] @ delta[:i]"},
        {"torch.linalg.solve_triangular(A, right, upper=False)": "torch.linalg.inv(A) @ right"},
    ],
}  # fmt: skip
