//! Draws the optimizer, frozen parameters, and the limits of a step.

use super::{Draft, Feature};

pub const FEATURES: &[Feature] = &[
    adamw,
    muon,
    sgd,
    adam,
    adan,
    lion,
    rmsprop,
    adagrad,
    groups,
    clip,
    qk_clip,
    freeze,
    lora,
    lora,
    ema,
    skip_spikes,
    loss_scale,
];

impl Draft<'_> {
    fn has_other_optimizer(&self) -> bool {
        self.has("train.optimizer.name")
            || self.has("memory.offload.optimizer")
            || self.has("kernels.optimizer")
    }

    fn one_of_optimizer(&mut self, name: &str, settings: &[(&str, &str)]) -> bool {
        if self.has_other_optimizer() {
            return false;
        }
        self.settings.remove("train.optimizer");
        for (key, value) in settings {
            if self.random.once_in(2) {
                self.set(&format!("train.optimizer.{key}"), value);
            }
        }
        self.set_text("train.optimizer.name", name)
    }
}

fn adamw(draft: &mut Draft<'_>) -> bool {
    if draft.has("train.optimizer") {
        return false;
    }
    draft.one_of_optimizer(
        "adamw",
        &[
            ("beta1", "0.5"),
            ("beta2", "0.9"),
            ("epsilon", "1e-6"),
            ("weight_decay", "0.5"),
        ],
    )
}

fn muon(draft: &mut Draft<'_>) -> bool {
    let settings = [
        ("momentum", "0.5"),
        ("nesterov", "false"),
        ("ns_steps", "3"),
        ("scale", "\"original\""),
        ("weight_decay", "0.3"),
        ("adamw.beta1", "0.5"),
        ("adamw.beta2", "0.9"),
        ("adamw.epsilon", "1e-6"),
        ("adamw.weight_decay", "0.3"),
    ];
    draft.one_of_optimizer("muon", &settings)
}

fn sgd(draft: &mut Draft<'_>) -> bool {
    let is_sgd = draft.one_of_optimizer("sgd", &[("weight_decay", "0.1")]);
    if is_sgd {
        match draft.random.below(3) {
            0 => drop(draft.set("train.optimizer.nesterov", true)),
            1 => drop(draft.set("train.optimizer.dampening", 0.2)),
            _ => drop(draft.set("train.optimizer.momentum", 0.5)),
        }
    }
    is_sgd
}

fn adam(draft: &mut Draft<'_>) -> bool {
    draft.one_of_optimizer(
        "adam",
        &[
            ("amsgrad", "true"),
            ("weight_decay", "0.1"),
            ("beta1", "0.5"),
        ],
    )
}

fn adan(draft: &mut Draft<'_>) -> bool {
    draft.one_of_optimizer("adan", &[("beta3", "0.9"), ("weight_decay", "0.1")])
}

/// Draws the optimizer Lion, which uses the sign of the gradient. The sign is noise where the exact gradient is 0, as
/// in the gradient of a key bias.
fn lion(draft: &mut Draft<'_>) -> bool {
    let has_noise =
        draft.has_learned_positions() || draft.has("model.bias") || draft.has("model.norm");
    !has_noise
        && draft.one_of_optimizer(
            "lion",
            &[("beta1", "0.5"), ("beta2", "0.9"), ("weight_decay", "0.3")],
        )
}

fn rmsprop(draft: &mut Draft<'_>) -> bool {
    let settings = [
        ("alpha", "0.9"),
        ("momentum", "0.5"),
        ("centered", "true"),
        ("weight_decay", "0.1"),
    ];
    draft.one_of_optimizer("rmsprop", &settings)
}

fn adagrad(draft: &mut Draft<'_>) -> bool {
    let settings = [
        ("lr_decay", "0.1"),
        ("epsilon", "1e-6"),
        ("weight_decay", "0.1"),
    ];
    draft.one_of_optimizer("adagrad", &settings)
}

fn groups(draft: &mut Draft<'_>) -> bool {
    let group = match draft.random.below(3) {
        0 => "[{ pattern = \"embedding.*\", weight_decay = 0.0, learning_rate = 0.5 }]",
        1 => "[{ pattern = \"blocks.0.**\", learning_rate = 0.1 }]",
        _ => "[{ pattern = \"blocks.*.attention.**\", weight_decay = 2.0 }]",
    };
    !draft.conflicts(&["lora", "train.freeze"]) && draft.set("train.optimizer.groups", group)
}

fn clip(draft: &mut Draft<'_>) -> bool {
    let clip = draft.random.one_of(&["0.05", "1e9"]);
    draft.set("train.clip", clip)
}

/// Draws QK clip. With the split zigzag-per-document, the padding counts for the largest logit. One rank has no such
/// padding.
fn qk_clip(draft: &mut Draft<'_>) -> bool {
    let norms = draft.is("model.family", "qwen3") || draft.is("model.family", "qwen3_moe");
    let norms =
        norms || draft.is("model.family", "olmoe") || draft.is("model.family", "gemma3_text");
    let is_refused = norms
        || draft.conflicts(&["model.qk_norm", "lora", "train.freeze"])
        || draft.is("parallel.context_split", "zigzag-per-document")
        || draft.has("parallel.hybrid_context_parallel");
    if is_refused {
        return false;
    }
    draft.set("train.qk_clip.alpha", 0.3);
    draft.set("train.qk_clip.threshold", 1e-3)
}

fn freeze(draft: &mut Draft<'_>) -> bool {
    let patterns = [
        "\"embedding.**\"",
        "\"blocks.0.**\"",
        "\"blocks.*.attention.**\"",
    ];
    let pattern = draft.random.one_of(&patterns);
    let is_refused = draft.conflicts(&["lora", "train.optimizer.groups", "train.qk_clip"]);
    !is_refused && draft.set("train.freeze", format_args!("[{pattern}]"))
}

fn lora(draft: &mut Draft<'_>) -> bool {
    let others = [
        "train.freeze",
        "train.optimizer.groups",
        "train.qk_clip",
        "memory",
        "parallel.defer_embedding_wgrad",
        "model.mla",
    ];
    if draft.conflicts(&others) {
        return false;
    }
    let targets = match draft.random.below(4) {
        0 => "[\"all-linear\"]",
        1 => "[\"o_proj\"]",
        2 => "[\"q_proj\", \"k_proj\"]",
        _ => "[\"q_proj\", \"v_proj\"]",
    };
    draft.set("lora.target_modules", targets);
    draft.set("lora.rank", 3);
    if draft.random.once_in(3) {
        draft.set("lora.alpha", 6.0);
    }
    if draft.random.once_in(3) {
        draft.set("lora.rslora", true);
    }
    let splits_input = draft.axes.tensor > 1 && draft.axes.context > 1;
    if draft.random.once_in(3) && !splits_input {
        draft.set("lora.dropout", 0.2);
    }
    let usual = draft.random.once_in(3);
    draft.set("lora.init_lora_weights", usual)
}

fn ema(draft: &mut Draft<'_>) -> bool {
    if draft.random.once_in(2) {
        draft.set("train.ema.evaluate", false);
    }
    draft.set("train.ema.decay", 0.5)
}

fn skip_spikes(draft: &mut Draft<'_>) -> bool {
    draft.set("train.skip_spikes.sigmas", 1.5);
    draft.set("train.skip_spikes.window", 2)
}

fn loss_scale(draft: &mut Draft<'_>) -> bool {
    for (key, value) in [
        ("initial", "1024.0"),
        ("min", "1.0"),
        ("growth", "4.0"),
        ("backoff", "0.5"),
        ("growth_interval", "1"),
        ("hysteresis", "1"),
    ] {
        draft.set(&format!("train.loss_scale.{key}"), value);
    }
    true
}
