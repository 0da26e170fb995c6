//! What is said before the first step.

use burn_megatron::data::TextData;
use burn_megatron::device::DeviceKind;

use crate::recipe::{Plan, Recipe};

/// The ranks and the data.
pub fn print_run(
    recipe: &Recipe,
    plan: &Plan,
    text: &TextData,
    device: DeviceKind,
    threads: usize,
) {
    println!("{}\n", plan.mesh);
    let plural = if threads == 1 { "" } else { "s" };
    println!("engine   threads; {device}, {threads} compute thread{plural} per rank");
    if let Some(schedule) = &plan.schedule {
        let stages = plan
            .stages
            .iter()
            .map(|stage| stage.layers.len().to_string());
        println!(
            "pipeline {}: {} stages of {} layers, {} micro-batches",
            schedule.name(),
            schedule.stages(),
            stages.collect::<Vec<_>>().join(", "),
            schedule.micro_batches(),
        );
    }
    let train = &recipe.train;
    let length = train.sequence_length.unwrap_or(recipe.model.context);
    println!(
        "data     {} bytes to train on, {} held out",
        count(text.training().len()),
        count(text.held_out().len()),
    );
    let share = train.global_batch_size / recipe.parallel.data;
    println!(
        "batch    {} samples of {length} tokens: {} per rank in micro-batches of {}; {} tokens per \
         step, {} steps",
        train.global_batch_size,
        share,
        train.micro_batch_size,
        count(train.global_batch_size * length),
        train.steps,
    );
}

/// The size of the model: its parameters, and those of rank 0.
pub fn print_model(recipe: &Recipe, parameters: usize, own: usize, flops_per_token: f64) {
    let model = &recipe.model;
    println!(
        "model    {} layers, hidden {}, {} heads, context {}: {} parameters, {} on rank 0; {:.1} \
         MFLOP per token",
        model.layers,
        model.hidden,
        model.heads,
        model.context,
        count(parameters),
        count(own),
        flops_per_token / 1e6,
    );
}

/// A number with its thousands apart: `1 234 567`.
pub fn count(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().collect();
    groups
        .into_iter()
        .map(String::from_utf8_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn thousands_stand_apart() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(super::count),
            ["0", "999", "1 000", "1 234 567"]
        );
    }
}
