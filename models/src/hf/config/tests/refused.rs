//! Rejected configurations and their errors.

use burn_megatron::nn::moe::{RouterDType, ScoreFunction};

use super::*;
use crate::MtpConfig;

/// Returns the error for a file with this value.
fn refusal(value: Value, key: &str, to: Value) -> String {
    parse(&with(value, key, to)).unwrap_err().to_string()
}

#[test]
fn what_could_change_the_model_is_refused_by_name() {
    let unknown = |family: &str, key: &str, value: &str| {
        format!("unknown {key} = {value} for {family}, which could change the results of the model")
    };
    let refused =
        |key: &str, value: &str, fits: &str| format!("invalid {key} = {value}: expected {fits}");
    let rope = |kind: &str| json!({ "rope_type": kind, "factor": 2.0 });
    let longrope = |short: Value, original: usize| {
        json!({ "rope_type": "longrope", "short_factor": short, "long_factor": vec![2.0; 64],
            "original_max_position_embeddings": original })
    };
    let deepseek = || json!({ "model_type": "deepseek_v3" });
    let cases = [
        (
            llama(),
            "logit_scale",
            json!(0.5),
            unknown("llama", "logit_scale", "0.5"),
        ),
        (
            llama(),
            "sliding_window",
            json!(8),
            unknown("llama", "sliding_window", "8"),
        ),
        (
            qwen2(),
            "use_mrope",
            json!(true),
            refused("use_mrope", "true", "false"),
        ),
        (
            llama(),
            "rope_scaling.theta",
            json!(1),
            unknown("llama", "rope_scaling.theta", "1"),
        ),
        (
            gpt2(),
            "rope_theta",
            json!(1),
            unknown("gpt2", "rope_theta", "1"),
        ),
        (
            llama(),
            "attn_logit_softcapping",
            json!(50.0),
            unknown("llama", "attn_logit_softcapping", "50.0"),
        ),
        (
            llama(),
            "quantization_config",
            json!({"bits": 4}),
            "llama requires quantization_config.quant_method, which is missing".into(),
        ),
        (
            llama(),
            "quantization_config",
            json!({ "quant_method": "gptq", "bits": 4 }),
            refused(
                "quantization_config.quant_method",
                "\"gptq\"",
                "fp8 or mxfp4",
            ),
        ),
        (
            llama(),
            "quantization_config",
            json!({ "quant_method": "fp8", "weight_block_size": [64, 64] }),
            refused(
                "quantization_config.weight_block_size",
                "[64,64]",
                "[128,128]",
            ),
        ),
        (
            qwen2(),
            "attention_bias",
            json!(true),
            refused("attention_bias", "true", "false"),
        ),
        (
            olmoe(),
            "clip_qkv",
            json!(8.0),
            refused("clip_qkv", "8.0", "null"),
        ),
        (
            gemma2(),
            "layer_types",
            json!(["sliding_attention"]),
            refused(
                "layer_types",
                "[\"sliding_attention\"]",
                "46 times full_attention or sliding_attention",
            ),
        ),
        (
            llama(),
            "partial_rotary_factor",
            json!(0.5),
            refused("partial_rotary_factor", "0.5", "1.0"),
        ),
        (
            llama(),
            "rope_scaling",
            json!({ "rope_type": "linear" }),
            "llama requires rope_scaling.factor, which is missing".into(),
        ),
        (
            llama(),
            "rope_scaling",
            rope("longer"),
            refused(
                "rope_scaling.rope_type",
                "\"longer\"",
                "default, linear, dynamic, llama3, yarn or longrope",
            ),
        ),
        (
            llama(),
            "rope_scaling",
            rope("llama3"),
            "llama requires rope_scaling.low_freq_factor, which is missing".into(),
        ),
        (
            llama(),
            "rope_scaling",
            rope("su"),
            refused(
                "rope_scaling.rope_type",
                "\"su\"",
                "default, linear, dynamic, llama3, yarn or longrope",
            ),
        ),
        (
            llama(),
            "rope_scaling",
            longrope(json!([1.0, 2.0]), 32),
            "model.positions.rotary.scaling.longrope: invalid short_factor = 2 factors for 128 features: \
             expected one factor for each pair of features"
                .into(),
        ),
        (
            llama(),
            "rope_scaling",
            longrope(json!(2.0), 32),
            refused(
                "rope_scaling.short_factor",
                "2.0",
                "a list of numbers of at least 0",
            ),
        ),
        (
            llama(),
            "rope_scaling",
            longrope(json!(vec![1.0; 64]), 1),
            refused(
                "rope_scaling.original_max_position_embeddings",
                "1",
                "at least 2, or a number for attention_factor",
            ),
        ),
        (
            llama(),
            "rope_scaling",
            rope("longrope"),
            "llama requires rope_scaling.short_factor, which is missing".into(),
        ),
        (
            deepseek(),
            "rope_scaling",
            json!({ "rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7 }),
            refused("rope_scaling.mscale_all_dim", "0.7", "0.0"),
        ),
        (
            llama(),
            "rope_scaling",
            json!(3),
            refused("rope_scaling", "3", "an object or null"),
        ),
        (
            llama(),
            "rope_scaling.rope_theta",
            json!(1.5),
            refused("rope_theta", "500000.0", "1.5, as in the scaling"),
        ),
        (
            llama(),
            "hidden_act",
            json!("relu"),
            refused(
                "hidden_act",
                "\"relu\"",
                "silu, swish, gelu_pytorch_tanh, gelu_new, gelu_fast, quick_gelu",
            ),
        ),
        (
            gpt2(),
            "scale_attn_by_inverse_layer_idx",
            json!(true),
            refused("scale_attn_by_inverse_layer_idx", "true", "false"),
        ),
        (gpt2(), "n_ctx", json!(512), refused("n_ctx", "512", "1024")),
        (
            gpt2(),
            "embd_pdrop",
            json!(0.2),
            refused("embd_pdrop", "0.2", "0.1, as resid_pdrop"),
        ),
        (
            llama(),
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            refused(
                "architectures",
                "[\"LlamaForSequenceClassification\"]",
                "[\"LlamaForCausalLM\"]",
            ),
        ),
        (
            llama(),
            "hidden_size",
            json!(-1),
            refused("hidden_size", "-1", "a whole number from 1 to 16777216"),
        ),
        (
            llama(),
            "hidden_size",
            json!(u64::MAX),
            refused(
                "hidden_size",
                "18446744073709551615",
                "a whole number from 1 to 16777216",
            ),
        ),
        (
            llama(),
            "num_hidden_layers",
            Value::Null,
            refused(
                "num_hidden_layers",
                "null",
                "a value; without the key it is 32",
            ),
        ),
        (
            llama(),
            "rms_norm_eps",
            json!(-0.1),
            refused("rms_norm_eps", "-0.1", "a number of at least 0"),
        ),
        (
            llama(),
            "num_key_value_heads",
            json!(5),
            "model: 32 heads are not divisible by 5 key-value groups: \
            expected 1, 2, 4, 8, 16, 32 groups"
                .into(),
        ),
        (
            llama(),
            "torch_dtype",
            json!("int8"),
            refused(
                "torch_dtype",
                "\"int8\"",
                "float64, float32, float16 or bfloat16",
            ),
        ),
        (
            llama(),
            "model_type",
            json!("mamba"),
            "unknown model_type = \"mamba\": expected \
            gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmoe, gemma2, gemma3_text, \
            deepseek_v2, deepseek_v3 or gpt_oss"
                .into(),
        ),
        (
            json!({ "model_type": "deepseek_v3" }),
            "rope_interleave",
            Value::Null,
            refused(
                "rope_interleave",
                "null",
                "true, because transformers reads null as false",
            ),
        ),
        (
            llama(),
            "eos_token_id",
            json!([1, "x"]),
            refused("eos_token_id", "\"x\"", "a token id"),
        ),
    ];
    for (value, key, to, wanted) in cases {
        assert_eq!(refusal(value, key, to), wanted);
    }
    let nan = llama()
        .to_string()
        .replace("1e-5", "NaN")
        .replace("0.00001", "NaN");
    assert!(
        HfConfig::parse(nan.as_bytes())
            .unwrap_err()
            .to_string()
            .starts_with("not a JSON")
    );
    assert!(HfConfig::parse(b"[1]").is_err());
}

/// Missing keys have the defaults of the classes of `transformers`, not the values of published files.
#[test]
fn what_is_missing_is_that_of_the_class() {
    let without = |mut value: Value, key: &str| {
        value.as_object_mut().unwrap().remove(key).unwrap();
        parse(&value).unwrap().model
    };
    assert_eq!(without(mistral(), "sliding_window").window, Some(4096));
    assert_eq!(without(mistral(), "num_key_value_heads").groups, Some(8));
    assert_eq!(without(qwen3(), "head_dim").head_width, Some(128));
    assert_eq!(without(llama(), "num_key_value_heads").groups, Some(32));
    assert_eq!(without(llama(), "rms_norm_eps").norm_epsilon, 1e-6);
    assert_eq!(without(mixtral(), "rms_norm_eps").norm_epsilon, 1e-5);
    assert_eq!(without(qwen3_moe(), "num_hidden_layers").layers, 24);
    let moe = without(qwen3_moe(), "norm_topk_prob").moe.unwrap();
    assert_eq!(moe.score, ScoreFunction::PreSoftmax);
    let positions = without(mixtral(), "rope_theta").positions;
    assert_eq!(positions, Positions::rotary(1e6));
    // `null` is a value, and so is another name.
    let all = parse(&with(mistral(), "sliding_window", Value::Null)).unwrap();
    assert_eq!(all.model.window, None);
    let mut other = qwen3_moe();
    other["num_local_experts"] = json!(16);
    assert_eq!(without(other, "num_experts").moe.unwrap().experts, 16);
    let mut other = mixtral();
    other["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 77.0 });
    let positions = without(other, "rope_theta").positions;
    assert_eq!(positions, Positions::rotary(77.0));
    for family in ModelFamily::ALL {
        let name = json!({ "model_type": family.name() });
        let refused = parse(&name).err().map(|error| error.to_string());
        let alone = name["model_type"] == "deepseek_v2";
        let wanted = "deepseek_v2 requires num_experts_per_tok, which is missing";
        assert_eq!(refused, alone.then(|| wanted.into()), "{name}");
    }
}

#[test]
fn windows_of_qwen_are_those_of_its_layers() {
    let windows = |first: Value, types: Value| {
        let mut value = with(qwen2(), "use_sliding_window", json!(true));
        value["max_window_layers"] = first;
        value["layer_types"] = types;
        value["sliding_window"] = json!(64);
        parse(&value)
            .map(|config| (config.model.window, config.model.layer_windows))
            .map_err(|error| error.to_string())
    };
    let types = |kind: &str, count: usize| json!(vec![kind; count]);
    let (all, none) = (Ok((Some(64), vec![])), Ok((None, vec![])));
    assert_eq!(windows(json!(0), Value::Null), all);
    assert_eq!(windows(json!(28), Value::Null), none);
    assert_eq!(windows(json!(3), types("full_attention", 28)), none);
    assert_eq!(windows(json!(3), types("sliding_attention", 28)), all);
    let rest = [vec![0; 3], vec![64; 25]].concat();
    assert_eq!(windows(json!(3), Value::Null), Ok((None, rest)));
    let mut first = types("full_attention", 28);
    first[0] = json!("sliding_attention");
    let only = [vec![64], vec![0; 27]].concat();
    assert_eq!(windows(json!(3), first), Ok((None, only)));
    let error = windows(json!("x"), Value::Null).unwrap_err();
    assert!(error.starts_with("invalid max_window_layers = "), "{error}");
    let error = windows(json!(3), types("full_attention", 27)).unwrap_err();
    assert!(error.starts_with("invalid layer_types = ["), "{error}");
    let off = with(qwen2(), "layer_types", types("sliding_attention", 28));
    let error = parse(&off).unwrap_err().to_string();
    assert!(error.ends_with("28 times full_attention"), "{error}");
}

#[test]
fn a_model_of_no_family_is_refused() {
    let refused = |change: fn(&mut TransformerConfig), model: TransformerConfig| {
        let mut model = model;
        change(&mut model);
        HfConfig::of(&model).unwrap_err().to_string()
    };
    let (gpt2, llama) = (TransformerConfig::gpt2(), TransformerConfig::llama());
    assert_eq!(HfConfig::of(&gpt2).unwrap().family, ModelFamily::Gpt2);
    assert_eq!(HfConfig::of(&llama).unwrap().family, ModelFamily::Llama);
    let cases = [
        refused(|model| model.norm = NormKind::Layer, llama.clone()),
        refused(|model| model.norm = NormKind::Rms, gpt2.clone()),
        refused(|model| model.norm_zero_centered = true, llama.clone()),
        refused(|model| model.activation = Activation::Gelu, llama.clone()),
        refused(|model| model.activation = Activation::SwiGlu, gpt2.clone()),
        refused(|model| model.bias = false, gpt2.clone()),
        refused(|model| model.qkv_bias = Some(false), gpt2.clone()),
        refused(|model| model.groups = Some(1), gpt2.clone()),
        refused(|model| model.head_width = Some(8), gpt2.clone()),
        refused(|model| model.window = Some(8), gpt2.clone()),
        refused(
            |model| model.layer_windows = vec![8, 0, 8, 0],
            llama.clone(),
        ),
        refused(|model| model.qk_norm = Some(QkNorm::Whole), llama.clone()),
        refused(|model| model.qk_norm = Some(QkNorm::Heads), gpt2),
        refused(
            |model| (model.bias, model.window) = (true, Some(8)),
            llama.clone(),
        ),
        refused(
            |model| (model.bias, model.qk_norm) = (true, Some(QkNorm::Heads)),
            llama.clone(),
        ),
        refused(
            |model| (model.qkv_bias, model.qk_norm) = (Some(true), Some(QkNorm::Heads)),
            llama,
        ),
    ];
    for error in cases {
        assert!(
            error.starts_with("no supported Hugging Face family computes this model"),
            "{error}"
        );
    }
}

#[test]
fn the_setting_that_a_family_requires_is_named() {
    type Change = fn(&mut TransformerConfig);
    let cases: [(ModelFamily, Change, &str); 4] = [
        (
            ModelFamily::Llama,
            |model| model.norm_zero_centered = true,
            "llama requires norm_zero_centered = false",
        ),
        (
            ModelFamily::Mixtral,
            |model| model.moe.as_mut().unwrap().router_bias = true,
            "mixtral requires moe.router_bias = false",
        ),
        (
            ModelFamily::DeepseekV2,
            |model| model.mtp = Some(MtpConfig::default()),
            "deepseek_v2 requires no mtp",
        ),
        (
            ModelFamily::Gpt2,
            |model| model.activation = Activation::SwiGlu,
            "gpt2 requires an activation that transformers has",
        ),
    ];
    for (family, change, wanted) in cases {
        let mut model = family.defaults();
        change(&mut model);
        let error = HfConfig::of(&model).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn settings_of_training_belong_to_no_family() {
    for family in ModelFamily::ALL {
        let mut model = family.defaults();
        (model.attention_dropout, model.label_smoothing) = (0.1, 0.1);
        if let Some(moe) = &mut model.moe {
            moe.jitter = 0.1;
            moe.router_dtype = RouterDType::F64;
            moe.bias_update_rate = moe.bias_update_rate.map(|rate| 2.0 * rate);
        }
        if *family == ModelFamily::DeepseekV3 {
            model.mtp = Some(MtpConfig {
                layers: 2,
                loss_scaling_factor: 0.7,
            });
        }
        assert_eq!(HfConfig::of(&model).unwrap().family, *family);
    }
}
