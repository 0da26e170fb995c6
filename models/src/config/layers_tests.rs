use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, ModelBuilder, QkNorm};
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::hf::{HfFamily, ModelFamily};
use crate::{MoeConfig, MtpConfig, Positions, TransformerConfig};

#[test]
fn norms_of_queries_and_keys_are_named_or_switched() {
    let with = |value: Value| {
        let mut settings = json!(TransformerConfig::llama());
        settings["qk_norm"] = value;
        serde_json::from_value::<TransformerConfig>(settings)
    };
    for (value, wanted, written) in [
        (json!(false), None, json!(false)),
        (json!(true), Some(QkNorm::Heads), json!(true)),
        (json!("heads"), Some(QkNorm::Heads), json!(true)),
        (json!("whole"), Some(QkNorm::Whole), json!("whole")),
    ] {
        let config = with(value).unwrap();
        assert_eq!(config.qk_norm, wanted);
        assert_eq!(json!(config)["qk_norm"], written);
    }
    for (value, wanted) in [
        (
            json!("all"),
            "unknown variant `all`, expected `heads` or `whole`",
        ),
        (json!(1), "expected true, false, \"heads\" or \"whole\""),
    ] {
        let error = with(value).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn settings_of_layers_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut TransformerConfig)| {
        let mut config = TransformerConfig::llama();
        change(&mut config);
        config.check(1, false).unwrap_err().to_string()
    };
    assert_snapshot!(
        refused(|config| config.layer_windows = vec![4; 5]),
        @"model: 5 layer_windows for 4 layers: expected at most one for each, with 0 for a layer without a window; a \
          shorter list is repeated"
    );
    assert_snapshot!(
        refused(|config| (config.window, config.layer_windows) = (Some(4), vec![4, 0, 4, 0])),
        @"model: window conflicts with layer_windows: remove one of them"
    );
    assert_snapshot!(
        refused(|config| config.local_base = Some(1.0)),
        @"model: invalid local_base = 1: expected a finite number above 1"
    );
    assert_snapshot!(
        refused(|config| {
            (config.local_base, config.positions) = (Some(10.0), Positions::Learned)
        }),
        @"model: local_base requires rotary positions, but the model has learned positions: remove local_base"
    );
    assert_snapshot!(
        refused(|config| config.logit_soft_cap = Some(f64::NAN)),
        @"model: invalid logit_soft_cap = NaN: expected a number above 0 and finite in f32"
    );
}

#[test]
fn windows_are_those_of_each_layer() {
    let config = TransformerConfig {
        layer_windows: vec![3, 0, 5, 0],
        ..TransformerConfig::llama()
    };
    assert_eq!(config.windows(), [Some(3), None, Some(5), None]);
    // The length of the pattern does not divide the number of layers, as in Gemma 3. A list with one window per layer
    // describes the same model.
    let pattern = |windows: &[usize]| TransformerConfig {
        layer_windows: windows.to_vec(),
        ..TransformerConfig::llama()
    };
    let short = pattern(&[3, 3, 0]);
    assert_eq!(short.windows(), [Some(3), Some(3), None, Some(3)]);
    assert!(short.differences(&pattern(&[3, 3, 0, 3])).is_empty());
    assert_eq!(short.differences(&pattern(&[3, 0])).len(), 1);
    let config = TransformerConfig {
        window: Some(7),
        ..TransformerConfig::llama()
    };
    assert_eq!(config.windows(), [Some(7); 4]);
}

/// Checks that the plan has the same number of parameters as the module, and returns this number.
fn parameters(config: &TransformerConfig) -> u64 {
    let groups = ParallelContext::single();
    let builder = ModelBuilder::with(&groups, &Device::flex(), 0, DType::F32).outline();
    let outline = config.init_with(builder).unwrap();
    let entries = outline.table.entries().iter();
    let of_module: u64 = entries.map(|entry| entry.len() as u64).sum();
    let profile = config.profile(&ParallelConfig::new(), 1, 16);
    let whole = StageLayout {
        embedding: true,
        layers: 0..config.layers,
        loss: true,
    };
    let planned = profile.parameters([&whole]);
    assert_eq!(planned.dense + planned.expert, of_module, "{config:?}");
    of_module
}

fn experts(experts: usize, experts_per_token: usize, expert_width: usize) -> MoeConfig {
    MoeConfig {
        experts,
        experts_per_token,
        expert_width: Some(expert_width),
        ..MoeConfig::default()
    }
}

fn gpt_oss(layers: usize, of: usize) -> TransformerConfig {
    TransformerConfig {
        vocabulary: 201_088,
        hidden: 2880,
        layers,
        layer_windows: (0..layers).map(|layer| [128, 0][layer % 2]).collect(),
        heads: 64,
        groups: Some(8),
        head_width: Some(64),
        bias: true,
        sinks: true,
        activation: Activation::ClampedSwiGlu,
        moe: Some(MoeConfig {
            router_bias: true,
            ..experts(of, 4, 2880)
        }),
        ..TransformerConfig::mixtral()
    }
}

#[test]
fn parameters_are_the_published_ones() {
    let olmoe = TransformerConfig {
        vocabulary: 50_304,
        hidden: 2048,
        layers: 16,
        heads: 16,
        groups: None,
        moe: Some(MoeConfig {
            score: ScoreFunction::PreSoftmax,
            ..experts(64, 8, 1024)
        }),
        ..ModelFamily::Olmoe.defaults()
    };
    assert_eq!(parameters(&olmoe), 6_919_161_856);
    assert_eq!(parameters(&gpt_oss(24, 32)), 20_914_757_184);
    assert_eq!(parameters(&gpt_oss(36, 128)), 116_829_156_672);
    let tiny = TransformerConfig {
        vocabulary: 128,
        hidden: 64,
        heads: 4,
        groups: Some(2),
        head_width: Some(16),
        moe: gpt_oss(2, 4).moe.map(|moe| MoeConfig {
            experts_per_token: 2,
            expert_width: Some(48),
            ..moe
        }),
        ..gpt_oss(2, 4)
    };
    assert_eq!(parameters(&tiny), 117_200);
    let gemma =
        |family: ModelFamily, vocabulary, hidden, layers, heads, width, mlp| TransformerConfig {
            vocabulary,
            hidden,
            layers,
            layer_windows: vec![],
            heads,
            groups: Some(heads / 2),
            head_width: Some(width),
            mlp_width: Some(mlp),
            ..family.defaults()
        };
    let second = |hidden, layers, heads, width, mlp| {
        let family = ModelFamily::Gemma2;
        parameters(&gemma(family, 256_000, hidden, layers, heads, width, mlp))
    };
    assert_eq!(second(2304, 26, 8, 256, 9216), 2_614_341_888);
    assert_eq!(second(3584, 42, 16, 256, 14336), 9_241_705_984);
    assert_eq!(second(4608, 46, 32, 128, 36864), 27_227_128_320);
    let third = |vocabulary, hidden, layers, heads, width, mlp| {
        let family = ModelFamily::Gemma3Text;
        gemma(family, vocabulary, hidden, layers, heads, width, mlp)
    };
    let one = TransformerConfig {
        groups: Some(1),
        ..third(262_144, 1152, 26, 4, 256, 6912)
    };
    assert_eq!(parameters(&one), 999_885_952);
    for (config, wanted) in [
        (third(262_208, 2560, 34, 8, 256, 10240), 3_880_263_168),
        (third(262_208, 3840, 48, 16, 256, 15360), 11_766_034_176),
        (third(262_208, 5376, 62, 32, 128, 21504), 27_009_346_304),
    ] {
        assert_eq!(parameters(&config), wanted);
    }
}

/// Half of the layers of gpt-oss 120B have sliding windows, with 126 query-key pairs per query on average instead of
/// 2048. Tables of Megatron-Bridge give 32.61 GFLOP per token.
#[test]
fn operations_count_the_windows_of_layers() {
    let windowed = gpt_oss(36, 128);
    let whole = TransformerConfig {
        layer_windows: vec![],
        ..windowed.clone()
    };
    let [windowed, whole] = [windowed, whole].map(|model| model.flops_per_token(4096));
    let keys = 2048.0 - (128.0 - 128.0 * 127.0 / 8192.0);
    let saved = (whole - windowed) / (12.0 * 18.0 * keys * 4096.0);
    assert!((saved - 1.0).abs() < 1e-12, "{saved}");
    assert!((windowed / 1e9 - 32.61).abs() < 0.03, "{windowed}");
    let named = ModelFamily::of_name("gemma2").unwrap().defaults();
    assert_eq!(named.layer_kind(0), named.layer_kind(2));
    assert_ne!(named.layer_kind(0), named.layer_kind(1));
}

/// Each MTP module has a block with the sizes of the last block. The last stage has an additional embedding, unless it
/// is also the first stage.
#[test]
fn further_tokens_are_counted() {
    let with = |depths: usize, tied| TransformerConfig {
        tied,
        mtp: (depths > 0).then(|| MtpConfig {
            layers: depths,
            ..MtpConfig::default()
        }),
        ..TransformerConfig::deepseek()
    };
    for tied in [false, true] {
        let [none, one, two] = [0, 1, 2].map(|depths| parameters(&with(depths, tied)));
        assert_eq!(two - one, one - none);
    }
    let profile = with(1, false).profile(&ParallelConfig::new(), 1, 16);
    let last = StageLayout {
        embedding: false,
        layers: 4..4,
        loss: true,
    };
    let plain = with(0, false).profile(&ParallelConfig::new(), 1, 16);
    let [further, plain] = [profile, plain].map(|profile| {
        let elements = profile.parameters([&last]);
        elements.dense + elements.expert
    });
    let own = parameters(&with(1, false)) - parameters(&with(0, false));
    assert_eq!(further - plain, own + 256 * 128);
}
