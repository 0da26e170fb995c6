//! Published configurations, in both formats, and what is refused.

mod keys;
mod latent;
mod refused;

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, NormKind, QkNorm};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{MoeConfig, Positions, RotaryScaling, TransformerConfig};

/// Of [`ModelFamily`].
type HfConfig = super::HfConfig;

fn parse(value: &Value) -> Result<HfConfig, HfConfigError> {
    HfConfig::parse(value.to_string().as_bytes())
}

/// As `transformers` 4.42 wrote Llama 3.1 8B.
fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3"
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": true,
        "vocab_size": 128256
    })
}

/// As published for GPT-2.
fn gpt2() -> Value {
    json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": null,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true,
        "summary_type": "cls_index",
        "summary_use_proj": true,
        "task_specific_params": { "text-generation": { "do_sample": true, "max_length": 50 } },
        "vocab_size": 50257
    })
}

/// As Qwen 2.5 7B.
fn qwen2() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": true,
        "use_mrope": false,
        "use_sliding_window": false,
        "vocab_size": 152064
    })
}

/// As Qwen 3 0.6B.
fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "sliding_window": null,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 151936
    })
}

/// As Mistral 7B v0.1.
fn mistral() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": true,
        "vocab_size": 32000
    })
}

/// As Mixtral 8x7B v0.1.
fn mixtral() -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": true,
        "vocab_size": 32000
    })
}

/// As Qwen 3 30B-A3B.
fn qwen3_moe() -> Value {
    let mut keys = qwen3();
    for (key, value) in [
        ("architectures", json!(["Qwen3MoeForCausalLM"])),
        ("decoder_sparse_step", json!(1)),
        ("hidden_size", json!(2048)),
        ("intermediate_size", json!(6144)),
        ("max_window_layers", json!(48)),
        ("mlp_only_layers", json!([])),
        ("model_type", json!("qwen3_moe")),
        ("moe_intermediate_size", json!(768)),
        ("norm_topk_prob", json!(true)),
        ("num_attention_heads", json!(32)),
        ("num_experts", json!(128)),
        ("num_experts_per_tok", json!(8)),
        ("num_hidden_layers", json!(48)),
        ("num_key_value_heads", json!(4)),
        ("output_router_logits", json!(false)),
        ("router_aux_loss_coef", json!(0.001)),
        ("tie_word_embeddings", json!(false)),
    ] {
        keys[key] = value;
    }
    keys
}

/// As OLMoE 1B-7B 0924.
fn olmoe() -> Value {
    json!({
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "clip_qkv": null,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": false,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": false,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": true,
        "vocab_size": 50304
    })
}

/// As Gemma 2 27B.
fn gemma2() -> Value {
    json!({
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "initializer_range": 0.02,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "float32",
        "transformers_version": "4.42.0.dev0",
        "use_cache": true,
        "vocab_size": 256000
    })
}

/// As the text part of Gemma 3 4B, in the format of transformers 4.
fn gemma3() -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": null,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": null,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "use_cache": true,
        "vocab_size": 262208
    })
}

fn published() -> [Value; 10] {
    [
        gpt2(),
        llama(),
        mistral(),
        qwen2(),
        qwen3(),
        mixtral(),
        qwen3_moe(),
        olmoe(),
        gemma2(),
        gemma3(),
    ]
}

#[test]
fn published_models_are_understood() {
    let [
        gpt2,
        llama,
        mistral,
        qwen2,
        qwen3,
        mixtral,
        qwen3_moe,
        olmoe,
        gemma2,
        gemma3,
    ] = published().map(|value| parse(&value).unwrap());
    let model = &gpt2.model;
    assert_eq!(
        (model.norm, model.activation),
        (NormKind::Layer, Activation::GeluTanh)
    );
    assert_eq!((model.tied, model.bias, model.dropout), (true, true, 0.1));
    assert_eq!(model.mlp_width(), 3072);
    let model = &llama.model;
    assert_eq!(
        (llama.family, llama.dtype),
        (ModelFamily::Llama, Some(ElementType::Bf16))
    );
    assert_eq!(llama.tokens.eos, [128001, 128008, 128009]);
    assert_eq!(
        (model.groups, model.head_width, model.tied),
        (Some(8), Some(128), false)
    );
    let scaling = RotaryScaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 8192,
    };
    let base = 500_000.0;
    assert_eq!(model.positions, Positions::Rotary { base, scaling });
    assert_eq!(mistral.model.window, Some(4096));
    let model = &qwen2.model;
    assert_eq!(
        (model.qkv_bias, model.bias, model.window),
        (Some(true), false, None)
    );
    assert_eq!(
        (qwen3.model.qk_norm, qwen3.model.head_width),
        (Some(QkNorm::Heads), Some(128))
    );
    assert_eq!(qwen3.model.positions, Positions::rotary(1e6));
    assert_eq!(mixtral.model.moe, Some(MoeConfig::default()));
    let moe = MoeConfig {
        experts: 128,
        experts_per_token: 8,
        expert_width: Some(768),
        ..MoeConfig::default()
    };
    assert_eq!(qwen3_moe.model.moe, Some(moe));
    let moe = MoeConfig {
        experts: 64,
        experts_per_token: 8,
        score: ScoreFunction::PreSoftmax,
        ..MoeConfig::default()
    };
    assert_eq!(olmoe.model.moe, Some(moe));
    assert_eq!(olmoe.model.qk_norm, Some(QkNorm::Whole));
    let model = &gemma2.model;
    assert_eq!(model.attention_scale, Some(1.0 / 12.0));
    assert_eq!(
        (model.attention_soft_cap, model.logit_soft_cap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!(model.layer_windows, [[4096, 0]; 23].concat());
    let model = &gemma3.model;
    assert_eq!(
        (model.attention_soft_cap, model.attention_scale),
        (None, None)
    );
    assert_eq!(
        model.layer_windows[..7],
        [1024, 1024, 1024, 1024, 1024, 0, 1024]
    );
    let (base, scaling) = (1e6, RotaryScaling::Linear { factor: 8.0 });
    assert_eq!(model.positions, Positions::Rotary { base, scaling });
    assert_eq!(model.local_base, Some(1e4));
}

#[test]
fn blocks_with_experts_are_found() {
    for (step, dense, wanted) in [
        (1, json!([]), Some((1, 0))),
        (1, json!([0, 1]), Some((1, 2))),
        (2, json!([]), Some((2, 1))),
        (3, json!(null), Some((3, 2))),
        (1, json!([1, 3, 5]), Some((2, 0))),
        (1, json!([0, 1, 2, 3, 4, 5]), Some((1, 6))),
        (1, json!([1]), None),
        (1, json!([5]), None),
        (1, json!("all"), None),
    ] {
        let mut keys = qwen3_moe();
        keys["num_hidden_layers"] = json!(6);
        keys["decoder_sparse_step"] = json!(step);
        keys["mlp_only_layers"] = dense.clone();
        let found = parse(&keys).map(|config| config.model.moe.unwrap());
        match (found, wanted) {
            (Ok(moe), Some(wanted)) => assert_eq!((moe.every, moe.first_dense), wanted),
            (Err(error), None) => {
                assert!(error.to_string().contains("mlp_only_layers"), "{error}");
            }
            (found, _) => panic!("{step} {dense}: {found:?}"),
        }
    }
}

#[test]
fn the_spelling_of_transformers_5_says_the_same() {
    let old = parse(&llama()).unwrap();
    let mut new = llama();
    let keys = new.as_object_mut().unwrap();
    let mut rope = keys.remove("rope_scaling").unwrap();
    rope["rope_theta"] = keys.remove("rope_theta").unwrap();
    keys.insert("rope_parameters".into(), rope);
    let dtype = keys.remove("torch_dtype").unwrap();
    keys.insert("dtype".into(), dtype);
    keys.insert("head_dim".into(), json!(128));
    assert_eq!(parse(&new).unwrap(), old);
    let mut legacy = llama();
    let rope = legacy["rope_scaling"].as_object_mut().unwrap();
    let kind = rope.remove("rope_type").unwrap();
    rope.insert("type".into(), kind);
    assert_eq!(parse(&legacy).unwrap(), old);
}

#[test]
fn what_is_written_says_the_same() {
    let yarn = json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768 });
    let other = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "beta_slow": 2 });
    let exact = json!({ "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "truncate": false });
    let linear = json!({ "rope_type": "linear", "factor": 8.0 });
    let dynamic = json!({ "rope_type": "dynamic", "factor": 8.0 });
    let own = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "attention_factor": 1.1386 });
    // As in a model of Phi-3 with 64 pairs, where the factors of the scaling follow from both contexts.
    let longrope = json!({ "type": "longrope", "original_max_position_embeddings": 4096,
        "short_factor": vec![1.05; 64], "long_factor": vec![1.1; 64] });
    let scaled = [yarn, other, exact, linear, dynamic, own, longrope]
        .map(|rope| with(qwen2(), "rope_scaling", rope));
    let mut windowed = with(qwen3(), "use_sliding_window", json!(true));
    (windowed["sliding_window"], windowed["max_window_layers"]) = (json!(64), json!(21));
    let gated = with(llama(), "hidden_act", json!("gelu_pytorch_tanh"));
    let mut biased = with(llama(), "mlp_bias", json!(true));
    biased["attention_bias"] = json!(true);
    let more = [
        with(llama(), "mlp_bias", json!(true)),
        with(llama(), "attention_bias", json!(true)),
        with(qwen3(), "attention_bias", json!(true)),
        with(qwen3_moe(), "attention_bias", json!(true)),
        with(olmoe(), "attention_bias", json!(true)),
        with(gemma3(), "attention_bias", json!(true)),
        with(mixtral(), "num_experts_per_tok", json!(1)),
        with(qwen3_moe(), "num_experts_per_tok", json!(1)),
        with(olmoe(), "num_experts_per_tok", json!(1)),
    ];
    for value in published()
        .into_iter()
        .chain(scaled)
        .chain([gated, biased, windowed])
        .chain(more)
    {
        let config = parse(&value).unwrap();
        let text = config.to_json().unwrap();
        assert_eq!(HfConfig::parse(text.as_bytes()).unwrap(), config, "{text}");
        // The family follows from the model.
        assert_eq!(HfConfig::of(&config.model).unwrap().family, config.family);
    }
}

/// Null would mean YaRN to the class of `transformers`, and a window of null ends its forward pass.
#[test]
fn gpt_oss_without_scaling_or_windows_is_written_in_full() {
    let mut model = ModelFamily::GptOss.defaults();
    for windows in [vec![32, 0], vec![]] {
        let has_windows = !windows.is_empty();
        model.layer_windows = windows;
        let config: HfConfig = HfConfig::of(&model).unwrap();
        let text = config.to_json().unwrap();
        let keys: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(keys["rope_scaling"], json!({ "rope_type": "default" }));
        let window = if has_windows { 32 } else { 128 };
        assert_eq!(keys["sliding_window"], json!(window));
        let again = parse(&keys).unwrap().model;
        assert_eq!(again.windows(), model.windows());
        assert_eq!(again.positions, model.positions);
    }
}

#[test]
fn keys_that_nothing_reads_are_ignored_by_name() {
    let mut value = llama();
    for (key, to) in [
        (
            "auto_map",
            json!({ "AutoConfig": "configuration_x.XConfig" }),
        ),
        ("is_llama_config", json!(true)),
        ("rope_interleaved", json!(false)),
        ("sliding_window", Value::Null),
        ("transformers.js_config", json!({ "dtype": "q4" })),
        ("unsloth_version", json!("2026.1.1")),
        ("a_note", json!("by hand")),
        ("an_empty_one", Value::Null),
    ] {
        value[key] = to;
    }
    value["rope_scaling"]["finetuned"] = json!(true);
    let config = parse(&value).unwrap();
    assert_eq!(config.ignored, ["rope_scaling.finetuned", "a_note"]);
    assert_eq!(config.model, parse(&llama()).unwrap().model);
}

fn with(mut value: Value, key: &str, to: Value) -> Value {
    match key.split_once('.') {
        Some((outer, inner)) => value[outer][inner] = to,
        None => value[key] = to,
    }
    value
}

proptest! {
    /// Any content is parsed or refused, and what is parsed can be written.
    #[test]
    fn no_text_ends_the_program(
        which in 0usize..10, key in any::<prop::sample::Index>(),
        to in prop_oneof![
            Just(Value::Null), Just(json!({})), Just(json!([])), Just(json!("x")),
            any::<i32>().prop_map(|x| json!(x)), Just(json!(i64::MIN)), Just(json!(u64::MAX)),
            // Numbers that survive a JSON round trip exactly.
            any::<i32>().prop_map(|x| json!(f64::from(x) / 4.0)),
            (0u64..20).prop_map(|x| json!(x)), any::<bool>().prop_map(|x| json!(x)),
        ],
        at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut value = published()[which].clone();
        let keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        value[&keys[key.index(keys.len())]] = to;
        if let Ok(config) = parse(&value) {
            let text = config.to_json().unwrap();
            prop_assert_eq!(HfConfig::parse(text.as_bytes()).unwrap(), config);
        }
        let mut bytes = published()[which].to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = HfConfig::parse(&bytes);
    }
}
