//! What is said before the first step.

use burn_megatron::data::TextData;
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::Mesh;
use burn_megatron::nn::{ParameterTable, Place};

use crate::recipe::Recipe;

/// The ranks and the data.
pub fn print_run(
    recipe: &Recipe,
    mesh: &Mesh,
    text: &TextData,
    device: DeviceKind,
    threads: usize,
) {
    println!("{mesh}\n");
    let plural = if threads == 1 { "" } else { "s" };
    println!("engine   threads; {device}, {threads} compute thread{plural} per rank");
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

/// The size of the model.
pub fn print_model(recipe: &Recipe, table: &ParameterTable, place: Place, flops_per_token: f64) {
    let model = &recipe.model;
    println!(
        "model    {} layers, hidden {}, {} heads, context {}: {} parameters, {} on each tensor \
         rank; {:.1} MFLOP per token",
        model.layers,
        model.hidden,
        model.heads,
        model.context,
        count(table.num_elements()),
        count(table.local_elements(place)),
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
