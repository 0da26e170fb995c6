//! Draws the model: a model family in small sizes, and `[model]`.

use super::{Draft, Feature};

/// The model families. Common families are listed several times.
const FAMILIES: [&str; 18] = [
    "gpt2",
    "gpt2",
    "gpt2",
    "llama",
    "llama",
    "llama",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "gpt_oss",
];

impl Draft<'_> {
    pub fn is_latent(&self) -> bool {
        self.has("model.mla")
    }

    pub fn has_learned_positions(&self) -> bool {
        self.is("model.family", "gpt2") && !self.has("model.positions")
    }

    /// Returns whether attention must be fused. Ring attention exchanges parts of its state.
    pub fn needs_fused_attention(&self) -> bool {
        let exchange = self.settings.get("parallel.context_exchange");
        self.axes.context > 1 && exchange != Some("\"all-gather\"")
            || self.has("parallel.hybrid_context_parallel")
    }

    fn is_gpt(&self) -> bool {
        self.is("model.family", "gpt2")
    }
}

/// Draws a model family and sizes that fit the layout.
pub fn base(draft: &mut Draft<'_>) {
    let family = loop {
        let family = if draft.random.once_in(12) {
            "deepseek_v2"
        } else {
            draft.random.one_of(&FAMILIES)
        };
        let gathers_alone = family.starts_with("deepseek") && draft.axes.context > 1;
        let unfused = family == "gemma2" && draft.needs_fused_attention();
        if !gathers_alone && !unfused {
            break family;
        }
    };
    draft.set_text("model.family", family);
    draft.set("model.context", draft.sequence);
    draft.set("model.hidden", draft.hidden);
    draft.set("model.layers", draft.layers);
    draft.set("model.heads", draft.heads);
    let width = draft.random.one_of(&[32, 48, 64]);
    draft.set("model.mlp_width", width);
    if family.starts_with("deepseek") {
        latents(draft);
    } else if family != "gpt2" {
        groups(draft);
    }
    match family {
        "mistral" => drop(draft.set("model.window", 5)),
        "gemma2" | "gemma3_text" | "gpt_oss" => drop(layer_windows(draft)),
        _ => {}
    }
    if matches!(
        family,
        "mixtral" | "qwen3_moe" | "olmoe" | "deepseek_v2" | "deepseek_v3" | "gpt_oss"
    ) {
        super::experts::base(draft);
    }
}

fn latents(draft: &mut Draft<'_>) -> bool {
    for (key, width) in [
        ("kv_rank", 8),
        ("nope_width", 4),
        ("rope_width", 4),
        ("value_width", 6),
    ] {
        draft.set(&format!("model.mla.{key}"), width);
    }
    if draft.random.once_in(3) {
        draft.set("model.mla.norm_epsilon", "1e-5");
    }
    draft.set("model.mla.q_rank", 12)
}

fn groups(draft: &mut Draft<'_>) -> bool {
    if draft.is_latent() {
        return false;
    }
    let groups = draft.random.one_of(&[1, 2, 2, 4]);
    draft.set("model.groups", groups)
}

fn layer_windows(draft: &mut Draft<'_>) -> bool {
    let windows = match draft.layers {
        1 => "[5]",
        2 => "[5, 0]",
        _ => "[0, 7, 5]",
    };
    draft.settings.remove("model.window");
    draft.set("model.layer_windows", windows)
}

pub const FEATURES: &[Feature] = &[
    groups,
    vocabulary_divisible_by,
    head_width,
    norm,
    norm_epsilon,
    norm_zero_centered,
    activation,
    positions,
    biases,
    qk_norm,
    window,
    windows_of_layers,
    local_base,
    sinks,
    attention_scale,
    attention_soft_cap,
    logit_soft_cap,
    post_norms,
    scaled_embedding,
    tied,
    dropout,
    attention_dropout,
    initial_weights,
    label_smoothing,
    z_loss,
    latent,
    mtp,
    experts,
];

fn vocabulary_divisible_by(draft: &mut Draft<'_>) -> bool {
    let divisor = draft.random.one_of(&[3, 20, 50]);
    draft.set("model.vocabulary_divisible_by", divisor)
}

fn head_width(draft: &mut Draft<'_>) -> bool {
    let width = draft.random.one_of(&[4, 6, 8, 16]);
    !draft.is_latent() && draft.set("model.head_width", width)
}

fn norm(draft: &mut Draft<'_>) -> bool {
    let norm = if draft.is_gpt() { "rms" } else { "layer" };
    draft.set_text("model.norm", norm)
}

fn norm_epsilon(draft: &mut Draft<'_>) -> bool {
    draft.set("model.norm_epsilon", "1e-3")
}

fn norm_zero_centered(draft: &mut Draft<'_>) -> bool {
    draft.set("model.norm_zero_centered", true)
}

fn activation(draft: &mut Draft<'_>) -> bool {
    let activations = [
        "gelu",
        "gelu-tanh",
        "quick-gelu",
        "squared-relu",
        "swi-glu",
        "ge-glu",
        "quick-ge-glu",
        "clamped-swi-glu",
    ];
    let activation = draft.random.one_of(&activations);
    draft.set_text("model.activation", activation)
}

fn positions(draft: &mut Draft<'_>) -> bool {
    let scaling = match draft.random.below(4) {
        0 => "",
        1 => ", scaling = { llama3 = { factor = 4.0, low = 1.0, high = 2.0, original = 8 } }",
        2 => {
            ", scaling = { yarn = { factor = 2.0, original = 8, beta_fast = 4.0, beta_slow = 1.0, mscale = 1.0, \
             mscale_all_dim = 0.0 } }"
        }
        _ => ", scaling = { linear = { factor = 4.0 } }",
    };
    let base = draft.random.one_of(&["10000.0", "500.0"]);
    draft.set(
        "model.positions",
        format_args!("{{ rotary = {{ base = {base}{scaling} }} }}"),
    )
}

fn biases(draft: &mut Draft<'_>) -> bool {
    if draft.is_latent() {
        return false;
    }
    if draft.random.once_in(2) {
        draft.set("model.qkv_bias", true);
    }
    if draft.random.once_in(3) {
        draft.set("model.output_bias", draft.is_gpt());
    }
    let bias = !draft.is_gpt();
    draft.set("model.bias", bias)
}

fn qk_norm(draft: &mut Draft<'_>) -> bool {
    if draft.is_latent() || draft.conflicts(&["train.qk_clip"]) {
        return false;
    }
    if draft.random.once_in(2) {
        draft.set("model.qk_norm_zero_centered", true);
    }
    let kind = draft.random.one_of(&["heads", "whole"]);
    draft.set_text("model.qk_norm", kind)
}

fn window(draft: &mut Draft<'_>) -> bool {
    let window = draft.random.one_of(&[1, 3, 5, 12]);
    !draft.is_latent()
        && !draft.conflicts(&["model.layer_windows"])
        && draft.set("model.window", window)
}

fn windows_of_layers(draft: &mut Draft<'_>) -> bool {
    !draft.is_latent() && layer_windows(draft)
}

fn local_base(draft: &mut Draft<'_>) -> bool {
    let has_windows = draft.has("model.window") || draft.has("model.layer_windows");
    has_windows && !draft.has_learned_positions() && draft.set("model.local_base", "300.0")
}

fn sinks(draft: &mut Draft<'_>) -> bool {
    !draft.is_latent() && draft.set("model.sinks", true)
}

fn attention_scale(draft: &mut Draft<'_>) -> bool {
    !draft.is_latent() && draft.set("model.attention_scale", 0.3)
}

fn attention_soft_cap(draft: &mut Draft<'_>) -> bool {
    !draft.is_latent()
        && !draft.needs_fused_attention()
        && draft.set("model.attention_soft_cap", 0.5)
}

fn logit_soft_cap(draft: &mut Draft<'_>) -> bool {
    draft.set("model.logit_soft_cap", 2.0)
}

fn post_norms(draft: &mut Draft<'_>) -> bool {
    draft.set("model.post_norms", true)
}

fn scaled_embedding(draft: &mut Draft<'_>) -> bool {
    draft.set("model.scaled_embedding", true)
}

fn tied(draft: &mut Draft<'_>) -> bool {
    let tied = !draft.is_gpt();
    draft.set("model.tied", tied)
}

fn dropout(draft: &mut Draft<'_>) -> bool {
    draft.set("model.dropout", 0.2)
}

fn attention_dropout(draft: &mut Draft<'_>) -> bool {
    !draft.needs_fused_attention() && draft.set("model.attention_dropout", 0.2)
}

fn initial_weights(draft: &mut Draft<'_>) -> bool {
    let scaled = draft.random.once_in(2);
    draft.set("model.scaled_output_init", scaled);
    draft.set("model.init_std", 0.1)
}

fn label_smoothing(draft: &mut Draft<'_>) -> bool {
    draft.set("model.label_smoothing", 0.1)
}

fn z_loss(draft: &mut Draft<'_>) -> bool {
    draft.set("model.z_loss", 0.01)
}

fn latent(draft: &mut Draft<'_>) -> bool {
    let others = [
        "model.head_width",
        "model.window",
        "model.layer_windows",
        "model.qk_norm",
        "model.bias",
        "model.sinks",
        "model.attention_scale",
        "train.qk_clip",
        "lora",
    ];
    let is_llama = draft.is("model.family", "llama") && draft.axes.context == 1;
    if !is_llama || draft.conflicts(&others) {
        return false;
    }
    draft.set("model.groups", draft.heads);
    latents(draft)
}

fn mtp(draft: &mut Draft<'_>) -> bool {
    if draft.has_learned_positions() {
        return false;
    }
    let depths = draft.random.within((1, 2));
    draft.set("model.mtp.layers", depths);
    draft.set("model.mtp.loss_scaling_factor", 0.3)
}

/// Adds experts to a model without experts.
fn experts(draft: &mut Draft<'_>) -> bool {
    if draft.has("model.moe") || draft.conflicts(&["parallel.hybrid_context_parallel", "lora"]) {
        return false;
    }
    super::experts::base(draft);
    true
}
