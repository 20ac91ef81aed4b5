"""Reinforcement learning with the engine in the loop: the embedded model learns to sort more numbers than it did.

Each step asks for a group of answers to each of some questions, and makes those more likely that are better than the
others of their group (as in GRPO). The trainer is the model of `transformers` with the weights of the same folder; the
engine gets its new weights after each step, so it answers with the policy that is trained, to the last digits.

pip install pagewood-engine transformers
python grpo.py
"""

# pyright: basic
# torch and transformers are typed in part only.

import random
import sys

import torch
from transformers import AutoModelForCausalLM

from pagewood.engine import LLM, SamplingParams
from pagewood.engine.model_folder.folder import model_folder

NUM_STEPS, NUM_QUESTIONS, GROUP = 40, 12, 8
LEARNING_RATE = 2e-4


def make_question(draw: random.Random) -> tuple[str, str]:
    """Return a question and its right answer."""
    numbers = draw.choices(range(1, 21), k=6)
    return f"Sort: {', '.join(map(str, numbers))}", ", ".join(map(str, sorted(numbers)))


def log_probabilities(model: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> list[torch.Tensor]:
    """Return the log probability of each token of each answer to a prompt."""
    longest = max(map(len, answers))
    texts = torch.tensor([prompt + answer + [0] * (longest - len(answer)) for answer in answers])
    logits = model(texts[:, :-1]).logits[:, len(prompt) - 1 :]  # what stands behind an answer does not change it
    found = logits.log_softmax(-1).gather(-1, texts[:, len(prompt) :, None])[..., 0]
    return [row[: len(answer)] for row, answer in zip(found, answers, strict=True)]


def train(num_steps: int, *, seed: int = 0) -> list[float]:
    """Train, and return the share of right answers in each step."""
    draw, right = random.Random(seed), list[float]()
    folder = model_folder(None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with LLM(folder, weights="float32") as llm:
        for step in range(num_steps):
            questions = [make_question(draw) for _ in range(NUM_QUESTIONS)]
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text, _ in questions]
            sampling = [
                SamplingParams(temperature=1.0, max_tokens=32, seed=step * NUM_QUESTIONS + index, logprobs=0)
                for index in range(NUM_QUESTIONS)
            ]
            groups = llm.generate(prompts, sampling, n=GROUP, keep_stop_token=True)

            num_tokens = sum(len(one.tokens) for group in groups for one in group)
            rewards, difference = list[torch.Tensor](), 0.0
            for (_, expected), prompt, group in zip(questions, prompts, groups, strict=True):
                reward = torch.tensor([float(one.text == expected) for one in group])
                advantages = (reward - reward.mean()) / (reward.std() + 1e-3)
                ours = log_probabilities(model, prompt.tolist(), [list(one.tokens) for one in group])
                gains = [advantage * own.sum() for advantage, own in zip(advantages, ours, strict=True)]
                (-torch.stack(gains).sum() / num_tokens).backward()
                rewards.append(reward)
                for one, own in zip(group, ours, strict=True):
                    theirs = torch.tensor([entry.logprob for entry in one.logprobs])
                    difference = max(difference, float((own.detach() - theirs).abs().max()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            version = llm.update_weights(model.named_parameters())
            right.append(float(torch.cat(rewards).mean()))
            print(
                f"step {step + 1}: {right[-1]:.0%} right; log probabilities of trainer and engine differ by at most "
                f"{difference:.1e}; weights {version}"
            )
    return right


def main() -> None:
    """Train; the argument may be another number of steps."""
    right = train(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_STEPS)
    part = max(1, len(right) // 5)
    print(f"{sum(right[:part]) / part:.0%} right in the first steps, {sum(right[-part:]) / part:.0%} in the last")


if __name__ == "__main__":
    main()
