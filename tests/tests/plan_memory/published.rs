//! Compares planned memory with published figures.

use burn::tensor::DType;
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{Mesh, ParallelConfig};
use burn_megatron_models::TransformerConfig;
use burn_megatron_plan::memory::plan_memory;
use burn_megatron_plan::recorded_step::{ProfileRequest, profile_rank};

use super::llama;
use super::requests::Settings;

/// Returns the number of bytes per token that a layer in the middle of a model keeps, on 8 tensor ranks in bf16.
fn kept_of_a_token(config: &TransformerConfig, layout: ParallelConfig) -> f64 {
    let mesh = Mesh::new(&layout.with_tensor(8), 8).unwrap();
    let groups = ParallelContext::offline(mesh, 3).unwrap();
    let settings = Settings::default();
    let request = ProfileRequest {
        dtype: DType::BF16,
        shape: [1, config.context],
        ..settings.profile(config, &groups)
    };
    let profile = profile_rank(config, &request).unwrap();
    let [(_, stage)] = &profile.stages[..] else {
        panic!("one stage")
    };
    // The first layer has no addition before its norm, and the last layer has the final norm.
    let (layer, count) = &stage.layers[1];
    assert_eq!(*count, 2);
    layer.saved_bytes() as f64 / config.context as f64
}

/// Tests the sizes of Llama 3 to the byte. A layer uses flash attention, a gated MLP and sequence parallelism. In 16
/// bits, it keeps `(8h + 4q + 4kv + 6f) / t` bytes per token: two norms and the additions before them, queries, keys
/// and values, the output of attention, gate and value, and the activation. It also keeps f32 statistics: one per
/// norm, and one per head.
#[test]
fn a_layer_of_llama_3_keeps_the_published_bytes() {
    let sizes = [
        ("8B", 4096, 32, 14_336, 139_264),
        ("70B", 8192, 64, 28_672, 274_432),
        ("405B", 16_384, 128, 53_248, 520_192),
    ];
    for (name, hidden, heads, width, published) in sizes {
        let config = TransformerConfig {
            vocabulary: 128_256,
            context: 8192,
            hidden,
            layers: 4,
            heads,
            groups: Some(8),
            mlp_width: Some(width),
            ..llama()
        };
        let layout = ParallelConfig::new().with_sequence_parallel(true);
        let statistics = 2 * 4 + 4 * heads;
        let expected = (published + statistics) as f64 / 8.0;
        assert_eq!(kept_of_a_token(&config, layout), expected, "{name}");
    }
}

/// Korthikanti et al. 2022 (arXiv:2205.05198), table 2, for its four models. A layer with dropout keeps `34h / t`
/// bytes per token with sequence parallelism and selective recomputation, and `(10 + 24 / t) h` bytes without
/// sequence parallelism. Two of these bytes are dropout masks, which this library draws again instead of keeping
/// them. Fused attention needs no recomputation, and keeps one number per head. A layer norm keeps three numbers.
#[test]
fn a_layer_of_gpt_keeps_the_published_bytes() {
    for (name, hidden, heads) in [
        ("22B", 6144, 64),
        ("175B", 12_288, 96),
        ("530B", 20_480, 128),
        ("1T", 25_600, 160),
    ] {
        let config = TransformerConfig {
            vocabulary: 51_200,
            context: 2048,
            hidden,
            layers: 4,
            heads,
            ..TransformerConfig::gpt2()
        };
        let (norms, heads) = (2.0 * 12.0, 4.0 * heads as f64 / 8.0);
        let hidden = hidden as f64;
        let one = ParallelConfig::new;
        let sequence = kept_of_a_token(&config, one().with_sequence_parallel(true));
        assert_eq!(
            sequence,
            (34.0 - 2.0) * hidden / 8.0 + norms / 8.0 + heads,
            "{name}"
        );
        let whole = kept_of_a_token(&config, one());
        let replicated = (10.0 - 2.0) * hidden + norms;
        assert_eq!(whole, replicated + 24.0 * hidden / 8.0 + heads, "{name}");
    }
}

/// Megatron-LM's estimate of weights and optimizer state (`theoretical_memory_usage.py`) for Llama 3 8B. It counts 18
/// bytes per parameter in bf16, or `6 + 12 / data` bytes with its distributed optimizer.
#[test]
fn states_are_those_of_megatrons_estimate() {
    let config = TransformerConfig {
        vocabulary: 128_256,
        context: 8192,
        hidden: 4096,
        layers: 32,
        heads: 32,
        groups: Some(8),
        mlp_width: Some(14_336),
        tied: false,
        ..llama()
    };
    for (tensor, data, published) in [(1, 8, 60_226_959_360u64), (2, 4, 36_137_373_696)] {
        let layout = ParallelConfig::new()
            .with_tensor(tensor)
            .with_sequence_parallel(tensor > 1)
            .with_data(data);
        let settings = Settings::in_bf16_with_zero_1();
        let request = settings.memory(&config, &layout, 8);
        let state = &plan_memory(&config, &request).unwrap().states[0];
        let planned = state.parameters + state.gradients + state.optimizer;
        let apart = planned.abs_diff(published);
        // Buckets are padded to multiples of the number of ranks.
        assert!(apart < 100_000, "{planned} and {published}");
    }
}
