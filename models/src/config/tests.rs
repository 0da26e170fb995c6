use super::*;
use burn::tensor::{DType, Device};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices, Operation};
use burn_megatron::model::ModelConfig;
use insta::assert_snapshot;

fn error(change: impl FnOnce(&mut TransformerConfig), tensor: usize) -> String {
    let mut config = TransformerConfig::llama();
    change(&mut config);
    config.check(tensor, true).unwrap_err().to_string()
}

#[test]
fn what_would_fit_is_said() {
    assert_snapshot!(
        error(|config| config.heads = 12, 8),
        @"heads 12 cannot be split over tensor = 8: expected tensor = 1, 2, 3, 4, 6, 12"
    );
    assert_snapshot!(
        error(|config| config.groups = Some(3), 1),
        @"model: 4 heads are not divisible by 3 key-value groups: expected 1, 2, 4 groups"
    );
    assert_snapshot!(
        error(|config| config.hidden = 6, 1),
        @"model: hidden = 6 is not divisible by 4 heads: set head_width"
    );
    let hidden_42 = |config: &mut TransformerConfig| {
        config.hidden = 42;
        config.positions = Positions::Learned;
    };
    // The suggestions do not include 1, 3, 7 and 21, which are not divisible by two groups and two ranks.
    assert_snapshot!(
        error(hidden_42, 2),
        @"model: hidden = 42 is not divisible by 4 heads: expected 2, 6, 14, 42 heads, or set head_width"
    );
    let twelve_heads = |config: &mut TransformerConfig| {
        config.heads = 12;
        config.groups = Some(5);
    };
    // The suggestions do not include 3, because three groups can neither be split over four ranks nor replicated
    // evenly.
    assert_snapshot!(
        error(twelve_heads, 4),
        @"model: 12 heads are not divisible by 5 key-value groups: expected 1, 2, 4, 12 groups"
    );
    assert_snapshot!(
        error(|config| config.head_width = Some(5), 1),
        @"model: invalid head_width = 5: expected an even number above 0"
    );
    assert_snapshot!(error(|c| c.layers = 0, 1), @"model: invalid layers = 0: expected at least 1");
    assert!(error(|config| config.context = 6, 4).starts_with("context 6 cannot be split"));
    assert!(error(|config| config.dropout = 1.0, 1).contains("invalid dropout = 1:"));
}

#[test]
fn numbers_and_sizes_that_no_model_has_are_refused() {
    for (change, says) in [
        (
            (|c| c.norm_epsilon = 0.0) as fn(&mut TransformerConfig),
            "invalid norm_epsilon = 0:",
        ),
        (|c| c.norm_epsilon = f64::NAN, "invalid norm_epsilon = NaN:"),
        (|c| c.norm_epsilon = 1e-60, "invalid norm_epsilon = 0.0000"),
        (|c| c.z_loss = -1.0, "invalid z_loss = -1:"),
        (|c| c.z_loss = f64::INFINITY, "invalid z_loss = inf:"),
        (|c| c.init_std = -0.02, "invalid init_std = -0.02:"),
        (|c| c.init_std = f64::NAN, "invalid init_std = NaN:"),
        (|c| c.layers = 1 << 30, "expected at most 16384"),
        (
            |c| (c.hidden, c.heads) = (1 << 30, 1 << 20),
            "parameters: expected at most",
        ),
        (
            |c| c.head_width = Some(1 << 30),
            "invalid head_width = 1073741824: expected at most 65536",
        ),
        (|c| c.vocabulary_divisible_by = 1 << 30, ""),
    ] {
        let mut config = TransformerConfig::llama();
        change(&mut config);
        let found = config.check(1, false).map_err(|error| error.to_string());
        match says {
            "" => assert_eq!(found, Ok(32)),
            says => assert!(
                found.as_ref().is_err_and(|e| e.contains(says)),
                "{says}: {found:?}"
            ),
        }
    }
}

#[test]
fn a_kernel_that_the_model_cannot_use_is_refused_at_once() {
    let config = TransformerConfig {
        attention_dropout: 0.1,
        ..TransformerConfig::llama()
    };
    let check =
        |choice| config.check_kernels(&KernelChoices::all(choice), &Device::flex(), DType::F32);
    let error = check(KernelChoice::Fused).unwrap_err().to_string();
    assert!(
        error.starts_with("kernels: attention cannot be fused"),
        "{error}"
    );
    assert!(
        !check(KernelChoice::Auto)
            .unwrap()
            .is_fused(Operation::Attention)
    );
}

#[test]
fn fewer_groups_than_ranks_fit_if_they_divide_them() {
    let config = |groups, heads| TransformerConfig {
        groups: Some(groups),
        heads,
        head_width: Some(8),
        ..TransformerConfig::llama()
    };
    assert_eq!(config(2, 4).check(4, false).unwrap(), 8);
    assert_eq!(config(1, 4).check(4, false).unwrap(), 8);
    assert!(config(3, 12).check(4, false).is_err());
}

/// Checks the published FLOPs per token, in units of 1e5. They are computed as in Megatron-LM, with half of the
/// attention matrix.
#[test]
fn operations_per_token_are_the_published_ones() {
    let llama = |hidden, layers, heads, mlp| TransformerConfig {
        vocabulary: 128_256,
        hidden,
        layers,
        heads,
        groups: Some(8),
        mlp_width: Some(mlp),
        ..TransformerConfig::llama()
    };
    let experts = |experts, experts_per_token, width| {
        Some(crate::MoeConfig {
            experts,
            experts_per_token,
            expert_width: Some(width),
            ..crate::MoeConfig::default()
        })
    };
    let qwen = |hidden, layers, heads, moe| TransformerConfig {
        vocabulary: 151_936,
        groups: Some(4),
        head_width: Some(128),
        moe,
        ..llama(hidden, layers, heads, 1)
    };
    let mixtral = TransformerConfig {
        vocabulary: 32_000,
        moe: experts(8, 2, 14336),
        ..llama(4096, 32, 32, 14336)
    };
    let gpt3 = TransformerConfig {
        vocabulary: 51_200,
        hidden: 12288,
        layers: 96,
        heads: 96,
        ..TransformerConfig::gpt2()
    };
    let olmoe = TransformerConfig {
        vocabulary: 50_304,
        groups: None,
        moe: experts(64, 8, 1024),
        ..llama(2048, 16, 16, 1)
    };
    let gpt_oss = TransformerConfig {
        vocabulary: 201_088,
        groups: Some(8),
        head_width: Some(64),
        moe: experts(128, 4, 2880),
        ..llama(2880, 36, 64, 1)
    };
    for (name, config, seq, expected) in [
        ("Llama 3 8B", llama(4096, 32, 32, 14336), 8192, 51.4704),
        ("Llama 3 70B", llama(8192, 80, 64, 28672), 8192, 449.2225),
        (
            "Llama 3.1 405B",
            llama(16384, 126, 128, 53248),
            8192,
            2523.956,
        ),
        (
            "Qwen3 30B",
            qwen(2048, 48, 32, experts(128, 8, 768)),
            4096,
            23.0063,
        ),
        (
            "Qwen3 235B",
            qwen(4096, 94, 64, experts(128, 8, 1536)),
            4096,
            148.0348,
        ),
        ("Mixtral 8x7B", mixtral, 4096, 79.7065),
        ("GPT-3 175B", gpt3, 2048, 1061.947),
        ("OLMoE", olmoe, 4096, 7.8659),
        ("gpt-oss 120B", gpt_oss.clone(), 4096, 34.331),
    ] {
        let flops = config.flops_per_token(seq) / 1e9;
        assert!((flops - expected).abs() < 6e-4, "{name}: {flops}");
    }
    // Every layer has a sliding window of 128 tokens, with 126 query-key pairs per query on average instead of 2048.
    let windowed = TransformerConfig {
        window: Some(128),
        ..gpt_oss.clone()
    };
    let saved = gpt_oss.flops_per_token(4096) - windowed.flops_per_token(4096);
    let keys = 2048.0 - (128.0 - 128.0 * 127.0 / 8192.0);
    assert!((saved / (12.0 * 36.0 * keys * 4096.0) - 1.0).abs() < 1e-12);
}
