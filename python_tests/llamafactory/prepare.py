"""Make a tiny Llama with random weights, a byte-level tokenizer trained on the spot, and a data set. Argument: the folder."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
examples = [
    {"instruction": f"Say the number {i}.", "input": "", "output": f"The number is {i}; {i} comes before {i + 1}."}
    for i in range(64)
]
(folder / "numbers.json").write_text(json.dumps(examples))
(folder / "dataset_info.json").write_text(json.dumps({"numbers": {"file_name": "numbers.json"}}))

bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([json.dumps(example) for example in examples], vocab_size=384, special_tokens=["<s>", "</s>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
tokenizer.save_pretrained(folder / "model")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")
