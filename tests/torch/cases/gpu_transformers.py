# transformers: from_pretrained of a checkpoint that was made here, whose warm-up asks the allocator
# how much it holds, and a Trainer.
#: only gpu
#: needs transformers
#: needs accelerate
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=64)
made = GPT2LMHeadModel(config)
made.save_pretrained("model")
model = GPT2LMHeadModel.from_pretrained("model", device_map="cuda")
for name, weight in made.state_dict().items():
    assert torch.equal(model.state_dict()[name].cpu(), weight), name
assert torch.cuda.memory_allocated() > 0


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = (torch.arange(32) * 5 + index) % 128
        return {"input_ids": words, "labels": words}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        auto_find_batch_size=True,
    ),
    train_dataset=Words(),
)
trainer.train()
losses = [it["loss"] for it in trainer.state.log_history if "loss" in it]
assert losses[-1] < losses[0], losses
