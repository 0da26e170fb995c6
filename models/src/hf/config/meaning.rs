//! Classifies the keys of a `config.json` that no family reads.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

/// The configuration attributes that the code of `transformers` 5.24 reads, for all families together and for each
/// family. `index.py` next to the fixtures writes this file.
const READ: &str = include_str!("read.json");

/// Keys that do not change what a model computes for given tokens and weights. They concern names, generation, outputs,
/// other model heads, memory, and the programs that wrote the file.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "experts_implementation",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_router_logits",
    "output_scores",
    "predict_special_tokens",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Keys that change the results of other model classes, or of model code that was published with the weights.
const DANGEROUS: &[&str] = &[
    "alibi",
    "alpha",
    "attention_multiplier",
    "attn_logit_softcapping",
    "base",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "layer_types",
    "logit_scale",
    "logits_scaling",
    "long_mscale",
    "mrope_section",
    "no_rope_layers",
    "parallel_attn",
    "qk_layernorm",
    "quantization",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rotary_pct",
    "scale_depth",
    "scale_emb",
    "short_mscale",
    "sliding_window",
    "theta",
    "use_parallel_residual",
    "use_qk_norm",
];

/// The effect of a key that was not taken.
pub(super) enum Meaning {
    /// The key is known to have no effect.
    Harmless,
    /// Neither `transformers` nor this crate reads the key.
    Ignored,
    /// The key could change what the model computes.
    Dangerous,
}

static READ_KEYS: LazyLock<BTreeMap<String, Vec<String>>> =
    LazyLock::new(|| serde_json::from_str(READ).unwrap_or_default());

/// Returns the effect of a key of a family, or of a key in the nested object `within`.
pub(super) fn meaning(family: &str, within: &str, key: &str, value: &Value) -> Meaning {
    let is_of_rope = within.starts_with("rope_") || within.ends_with("_attention");
    if !within.is_empty() && !is_of_rope {
        return Meaning::Dangerous;
    }
    if value.is_null() || within.is_empty() && HARMLESS.contains(&key) {
        return Meaning::Harmless;
    }
    let lists = [READ_KEYS.get("all"), READ_KEYS.get(family)];
    // There is no list for a family of another crate, so every key is assumed to be read.
    let is_read = lists.iter().any(|list| {
        list.is_none_or(|list| within.is_empty() && list.iter().any(|read| read == key))
    });
    match is_read || DANGEROUS.contains(&key) {
        true => Meaning::Dangerous,
        false => Meaning::Ignored,
    }
}
