"""Start a training from the web interface's own runner, as its button does. Arguments: the folder of `prepare.py`, the output."""

import sys

from llamafactory.webui import interface

folder, out = sys.argv[1:]
engines = []
engine_class = interface.Engine
interface.Engine = lambda *args, **kwargs: engines.append(engine_class(*args, **kwargs)) or engines[-1]
interface.create_ui()
manager, runner = engines[0].manager, engines[0].runner
form = {elem: getattr(elem, "value", None) for elem in manager.get_elem_list()}
filled = {
    "top.lang": "en",
    "top.model_name": "Custom",
    "top.model_path": f"{folder}/model",
    "top.finetuning_type": "full",
    "top.template": "default",
    "train.dataset_dir": folder,
    "train.dataset": ["numbers"],
    "train.output_dir": out,
    "train.compute_type": "fp32",
    "train.use_badam": True,
    "train.badam_switch_mode": "descending",
    "train.badam_switch_interval": 1,
    "train.logging_steps": 1,
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 1,
    "train.extra_args": '{"max_steps": 4, "cutoff_len": 48, "use_cpu": true, "preprocessing_num_workers": 1}',
}
form |= {manager.get_elem_by_id(name): value for name, value in filled.items()}
for shown in runner.run_train(form):
    pass
print(next(value for value in shown.values() if isinstance(value, str)))
