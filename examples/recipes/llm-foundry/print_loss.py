"""A callback that prints one line for each step, the loss to its last bit. LLM Foundry imports it by `code_paths`."""

from composer import Callback, Logger, State
from composer.utils import dist
from llmfoundry.registry import callbacks


class PrintLoss(Callback):
    """Print `step N loss X`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            print(f"step {state.timestamp.batch.value} loss {state.loss.item().hex()}", flush=True)


callbacks.register("print_loss", func=PrintLoss)
