//! The memory that a run may use, checked against its plan before anything is allocated.

use std::str::FromStr;

use burn_megatron::data_parallel::{ZeroStage, format_bytes};
use burn_megatron::kernels::record::ShapeSettings;
use burn_megatron::plan::Recompute;
use burn_megatron::plan::memory::{MemoryReport, MemoryRequest};

use crate::error::Error;
use crate::recipe::Recipe;

/// Bytes, as in `80GiB`, `512MiB` or `1000000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "invalid size \"{text}\": expected bytes, or a number with KiB, MiB, GiB or TiB"
            )
        };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let power = match &text[digits.len()..] {
            "" => 0,
            "KiB" => 1,
            "MiB" => 2,
            "GiB" => 3,
            "TiB" => 4,
            _ => return Err(invalid()),
        };
        let number: f64 = digits.trim().parse().map_err(|_| invalid())?;
        let bytes = number * f64::from(1 << 10).powi(power);
        if bytes >= 1.0 && bytes < u64::MAX as f64 {
            Ok(Self(bytes as u64))
        } else {
            Err(invalid())
        }
    }
}

/// The plan of a run.
///
/// # Errors
///
/// For a recipe that cannot be run, and for a model with an operation that cannot be planned.
pub fn plan(recipe: &Recipe) -> Result<MemoryReport, Error> {
    let plan = recipe.plan()?;
    let train = &recipe.train;
    let share = train.global_batch_size / plan.layout.data_size();
    recipe.model.plan_memory(&MemoryRequest {
        layout: &plan.layout,
        ranks: plan.mesh.world_size(),
        micro_batch_size: train.micro_batch_size,
        sequence_length: train.sequence_length.unwrap_or(recipe.model.context()),
        micro_batches: (share / train.micro_batch_size).max(1),
        sharding: &recipe.data_parallel,
        kernels: &recipe.kernels,
        fp8: &recipe.fp8,
        recompute: &recipe.memory.recompute,
        settings: ShapeSettings::default(),
        slack: 1.0,
    })
}

/// Checks that each rank stays within the limit.
///
/// # Errors
///
/// What the fullest rank needs, by kind, and which changes of the recipe would fit.
pub fn check(recipe: &Recipe, ByteSize(limit): ByteSize) -> Result<(), Error> {
    let report = plan(recipe)?;
    let (rank, memory) = report.fullest();
    if memory.peak.total() <= limit {
        return Ok(());
    }
    let kinds = memory
        .peak
        .kinds()
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0);
    let kinds: Vec<_> = kinds
        .map(|(kind, bytes)| format!("{} {kind}", format_bytes(bytes)))
        .collect();
    let fits = changes(recipe).into_iter().filter(|(_, changed)| {
        plan(changed).is_ok_and(|report| report.fullest().1.peak.total() <= limit)
    });
    let fits: Vec<_> = fits.map(|(name, _)| name).collect();
    let advice = if fits.is_empty() {
        "no single change of micro_batch_size, zero_stage, tensor, context or pipeline fits".into()
    } else {
        format!("what fits: {}", fits.join(", or "))
    };
    Err(format!(
        "a rank of pipeline rank {rank} needs {} ({}), and --memory-limit is {}: {advice}",
        format_bytes(memory.peak.total()),
        kinds.join(", "),
        format_bytes(limit),
    )
    .into())
}

/// The recipe with one change each, on the same number of ranks. Those that are invalid have no plan.
fn changes(recipe: &Recipe) -> Vec<(String, Recipe)> {
    let mut changes = vec![];
    let mut add = |name: String, change: &dyn Fn(&mut Recipe)| {
        let mut changed = recipe.clone();
        change(&mut changed);
        changes.push((name, changed));
    };
    if recipe.train.micro_batch_size > 1 {
        add("micro_batch_size = 1".into(), &|it| {
            it.train.micro_batch_size = 1
        });
    }
    if !recipe.memory.recompute.is_on() {
        for kind in [Recompute::Selective, Recompute::Full] {
            let name = format!("memory.recompute.granularity = {:?}", kind.name());
            add(name, &|it| it.memory.recompute = kind.settings());
        }
    }
    let stages = [
        ZeroStage::Optimizer,
        ZeroStage::Gradients,
        ZeroStage::Parameters,
    ];
    for stage in stages
        .into_iter()
        .filter(|it| *it > recipe.data_parallel.zero_stage)
    {
        add(format!("zero_stage = {stage}"), &|it| {
            it.data_parallel.zero_stage = stage
        });
    }
    let data = recipe.parallel.data_size();
    if data.is_multiple_of(2) {
        let halved = format!("with data = {}", data / 2);
        let layout = &recipe.parallel;
        add(format!("tensor = {} {halved}", 2 * layout.tensor), &|it| {
            it.parallel.data = Some(data / 2);
            it.parallel.tensor *= 2;
        });
        add(
            format!("context = {} {halved}", 2 * layout.context),
            &|it| {
                it.parallel.data = Some(data / 2);
                it.parallel.context *= 2;
            },
        );
        add(
            format!("pipeline = {} {halved}", 2 * layout.pipeline),
            &|it| {
                it.parallel.data = Some(data / 2);
                it.parallel.pipeline *= 2;
            },
        );
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: &str = "
[parallel]
data = 4
[model]
layers = 2
[train]
micro_batch_size = 2
global_batch_size = 16
";

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!("1.5GiB".parse(), Ok(ByteSize(3 << 29)));
        assert_eq!("4096".parse(), Ok(ByteSize(4096)));
        for text in ["", "GiB", "8GB", "-1MiB", "0", "nan"] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains("expected bytes"), "{error}");
        }
    }

    #[test]
    fn a_run_that_does_not_fit_names_the_kinds_and_what_fits() {
        let recipe = crate::recipe::parsed(RECIPE).unwrap();
        let needed = plan(&recipe).unwrap().fullest().1.peak.total();
        check(&recipe, ByteSize(needed)).unwrap();
        let error = check(&recipe, ByteSize(needed - 1))
            .unwrap_err()
            .to_string();
        for text in [
            "parameters",
            "activations",
            "micro_batch_size = 1",
            "memory.recompute.granularity = \"full\"",
            "zero_stage = 1",
            "tensor = 2",
        ] {
            assert!(error.contains(text), "{error}");
        }
        let error = check(&recipe, ByteSize(1)).unwrap_err().to_string();
        assert!(
            error.ends_with("tensor, context or pipeline fits"),
            "{error}"
        );
    }
}
