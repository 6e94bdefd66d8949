"""The fit with Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarking.lightning_fit import quieten
from benchmarking.measuring import Probe
from benchmarking.workload import Batch, Job


def _only_item(items: list[Batch]) -> Batch:
    (item,) = items
    return item


def fit_hugging_face(job: Job, probe: Probe) -> None:
    """Fit with Hugging Face's Trainer and what it has for the same law, left at its defaults where the job allows."""
    import transformers

    quieten()
    transformers.logging.set_verbosity_error()

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            probe.window_starts()
            control.should_training_stop = state.global_step == job.windows - 1

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            probe.before_step(kwargs["model"])

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return range(len(self.train_dataset))  # accelerate gives every W-th micro-batch to a rank

    model = job.new_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            average_tokens_across_devices=True,
            per_device_train_batch_size=1,  # the data set's items are micro-batches already
            gradient_accumulation_steps=job.accumulate,
            max_steps=job.windows,
            bf16=job.precision == "bf16-mixed",
            use_cpu=job.device.type == "cpu",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            dataloader_num_workers=job.num_workers,
            dataloader_pin_memory=job.device.type == "cuda",
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=job.dataset(),
            data_collator=_only_item,
            optimizers=(job.new_optimizer(model.to(job.device)), None),
            callbacks=[Callback()],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # prints a summary at the end
        trainer.train()
