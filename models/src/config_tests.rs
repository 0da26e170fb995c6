use super::*;
use burn::tensor::{DType, Device};
use burn_megatron::choice::{KernelChoice, KernelChoices, Operation};
use burn_megatron::train::ModelConfig;

fn error(change: impl FnOnce(&mut TransformerConfig), tensor: usize) -> String {
    let mut config = TransformerConfig::llama();
    change(&mut config);
    config.check(tensor, true).unwrap_err().to_string()
}

#[test]
fn what_would_fit_is_said() {
    assert_eq!(
        error(|config| config.heads = 12, 8),
        "heads 12 cannot be split over tensor = 8; 1, 2, 3, 4, 6, 12 can",
    );
    assert_eq!(
        error(|config| config.groups = Some(3), 1),
        "model: 4 heads are not divisible by 3 key-value groups: expected 1, 2, 4 groups",
    );
    assert_eq!(
        error(|config| config.hidden = 6, 1),
        "model: hidden = 6 is not divisible by 4 heads: set head_width",
    );
    let hidden_42 = |config: &mut TransformerConfig| {
        config.hidden = 42;
        config.positions = Positions::Learned;
    };
    // Not 1, 3, 7 and 21, which are not divisible by two groups and two ranks.
    assert_eq!(
        error(hidden_42, 2),
        "model: hidden = 42 is not divisible by 4 heads: expected 2, 6, 14, 42 heads, or set head_width",
    );
    let twelve_heads = |config: &mut TransformerConfig| {
        config.heads = 12;
        config.groups = Some(5);
    };
    // Not 3, which four ranks can neither split nor replicate.
    assert_eq!(
        error(twelve_heads, 4),
        "model: 12 heads are not divisible by 5 key-value groups: expected 1, 2, 4, 12 groups",
    );
    assert_eq!(
        error(|config| config.head_width = Some(5), 1),
        "model: invalid head_width = 5: expected an even number above 0",
    );
    assert_eq!(
        error(|c| c.layers = 0, 1),
        "model: invalid layers = 0: expected at least 1"
    );
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
