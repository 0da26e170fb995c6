//! The end of a run: plots, a sample, and the closing lines.

use std::process::ExitCode;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::data_parallel::format_bytes;
use burn_megatron::device::DeviceKind;
use burn_megatron::kernels::device_memory::DriverMemory;
use burn_megatron::mesh::ContextSplit;
use burn_megatron::optim::LossScale;
use burn_megatron_data::Padding;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_train::metrics::{HeldOutMetrics, MetricsRecord, read_metrics};
use burn_megatron_train::plot::{ExpertHeatMap, LossCurve};
use burn_megatron_train::run_folder::RunFolder;
use burn_megatron_train::{ReplayError, TrainOutcome};

use super::args::PretrainArgs;
use crate::banner;
use crate::data::LossUnit;
use crate::error::Error;
use crate::family::RankMemory;
use crate::fp8::report;
use crate::interrupt;
use crate::memory_limit::PlannedMemory;
use crate::numbers::{count, grouped};
use crate::rank_run::RankResult;
use crate::recipe::Recipe;
use crate::{terminal, trace};

/// Writes the plots and the sample, and prints the closing lines.
pub fn finish(
    args: &PretrainArgs,
    (recipe, sample_config): (&Recipe, &GenerateConfig),
    unit: LossUnit,
    planned_memory: &PlannedMemory,
    folder: &RunFolder,
    result: RankResult,
) -> Result<ExitCode, Error> {
    let RankResult {
        outcome, sample, ..
    } = &result;
    let is_pipeline = recipe.parallel.pipeline > 1;
    trace::write(folder, result.ranks, is_pipeline, &result.events)?;
    let records = read_metrics(&folder.metrics())?;
    let model = format!("{}: {}", recipe.model.family(), recipe.model.describe());
    let mut title = format!("{model}; {}", banner::layout(recipe));
    if let Some(name) = recipe.data.name() {
        title += &format!("; {name}");
    }
    let curve = LossCurve::from_records(title, &records);
    curve.write_svg(&folder.loss_svg())?;
    println!("{}", curve.terminal(terminal::columns()));
    show_experts(&records, folder)?;
    if let Some(sample) = sample {
        replace_file(&folder.sample(), sample.as_bytes())?;
        println!("sample after {:?}:\n{sample}\n", sample_config.prompt);
    }
    report::write(folder, &result.fp8)?;
    print_memory(&result.memory);
    planned_memory.write_svg(&folder.memory_svg())?;
    banner::print("planned", planned_memory.to_string());
    if let Some(cost) = &outcome.replay_cost {
        banner::print("check", cost.to_string());
    }
    if let Some(graphs) = &outcome.cuda_graphs {
        banner::print("graphs", graphs.to_string());
    }
    if let Some(engine) = &result.engine {
        banner::print("engine", engine);
    }
    println!();
    let held_out = outcome.held_out;
    let parallel = &recipe.parallel;
    let per_document = parallel.context_split == ContextSplit::ZigzagPerDocument;
    if parallel.context > 1 && per_document || parallel.hybrid_tokens().is_some() {
        let Padding { added, all } = outcome.padding;
        let share = 100.0 * added as f64 / all.max(1) as f64;
        println!(
            "padding of split documents: {} of {}, {share:.1} %",
            grouped(added as usize),
            count(all as usize, "token")
        );
    }
    println!(
        "{}",
        describe_held_out(held_out.as_ref(), unit, outcome.steps)
    );
    println!("written to {}", folder.path().display());
    let loss_scale = recipe.train_config().loss_scale();
    print_skipped(recipe, outcome);
    if loss_scale != LossScale::None {
        println!("loss scale {} at the end", result.loss_scale);
    }
    if outcome.stopped {
        println!(
            "interrupted after {} of {}",
            outcome.steps,
            count(recipe.train.steps, "step")
        );
        if recipe.checkpoint.save {
            let device = match args.device {
                DeviceKind::Cpu => String::new(),
                device => format!(" --device {device}"),
            };
            let folder = folder.path().display();
            println!("resume with pretrain --resume {folder}{device}");
        }
    }
    println!("{}", describe_weights(recipe, folder)?);
    if outcome.stopped {
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    check_outcome(outcome)
}

/// Prints the number of skipped steps, and the reasons.
fn print_skipped(recipe: &Recipe, outcome: &TrainOutcome) {
    if outcome.without_targets > 0 {
        println!(
            "{} of {} were skipped, because all of their targets are masked",
            outcome.without_targets,
            count(outcome.steps, "step"),
        );
    }
    if outcome.spikes > 0 {
        println!(
            "{} of {} were skipped, because a loss or gradient norm was a spike",
            outcome.spikes,
            count(outcome.steps, "step"),
        );
    }
    let not_finite = outcome.skipped - outcome.without_targets - outcome.spikes;
    if not_finite > 0 {
        let helps = if matches!(recipe.train_config().loss_scale(), LossScale::Dynamic(_)) {
            "expected with a dynamic loss scale"
        } else {
            "try a lower --lr"
        };
        println!(
            "{not_finite} of {} were skipped, because a loss or a gradient was not finite: {helps}",
            count(outcome.steps, "step"),
        );
    }
}

/// Prints and plots the load of the experts, if the model has experts.
fn show_experts(records: &[MetricsRecord], folder: &RunFolder) -> Result<(), Error> {
    let summary = records.iter().rev().find_map(|record| match record {
        MetricsRecord::Experts(summary) => Some(summary),
        _ => None,
    });
    if let Some(summary) = summary {
        let step = summary.step;
        println!("experts in step {step}; load as a multiple of the even share\n");
        println!("{}\n", summary.table().fit(terminal::width()));
    }
    if let Some(map) = ExpertHeatMap::from_records(records) {
        map.write_svg(&folder.experts_svg())?;
        println!("{}", map.terminal(terminal::columns()));
    }
    Ok(())
}

/// Returns an error if the run diverged or every step was skipped.
fn check_outcome(outcome: &TrainOutcome) -> Result<ExitCode, Error> {
    let (step, what) = match outcome.diverged {
        Some(step) => (step, "no loss is finite from there on"),
        None => (outcome.steps, "the held-out loss is not finite"),
    };
    if let Some(verdict) = outcome.bad_loss.filter(|_| outcome.has_diverged()) {
        let message = format!("{what}; it is the same on another data-parallel rank");
        return Err(ReplayError {
            step,
            verdict,
            message,
        }
        .into());
    }
    if outcome.has_diverged() {
        return Err(format!(
            "training diverged at step {step}: {what}; lower --lr, or lengthen the warm-up"
        )
        .into());
    }
    if outcome.skipped == outcome.steps {
        Err("every step was skipped: the weights were never updated".into())
    } else {
        Ok(ExitCode::SUCCESS)
    }
}

/// Describes the last held-out loss and the other terms of the objective.
fn describe_held_out(held_out: Option<&HeldOutMetrics>, unit: LossUnit, steps: usize) -> String {
    let Some(held_out) = held_out else {
        return "held-out loss: none, because nothing was evaluated".into();
    };
    if held_out.tokens == 0 {
        return "held-out loss: none, because all held-out targets are masked".into();
    }
    let loss = unit.show(held_out.loss, held_out.bits_per_byte);
    let (steps, tokens) = (
        count(steps, "step"),
        count(held_out.tokens as usize, "token"),
    );
    let mut text = format!("held-out loss {loss} after {steps}, on {tokens}");
    if let Some(objective) = held_out.minimised.objective {
        text += &format!("\nobjective {objective:.4} on the same tokens: the loss");
        for (name, term) in held_out.minimised.terms() {
            text += &format!(" + {name} {term:.4}");
        }
    }
    text
}

/// Returns the last line, which contains the location of the weights.
fn describe_weights(recipe: &Recipe, folder: &RunFolder) -> Result<String, Error> {
    if !recipe.checkpoint.save {
        return Ok("the weights were not saved (--no-save)".into());
    }
    let latest = Checkpoint::open(folder.checkpoints())?;
    Ok(format!("the weights are in {}", latest.path().display()))
}

/// Prints the estimated and the measured memory of rank 0.
fn print_memory(memory: &RankMemory) {
    println!("memory of rank 0, without activations; measured: the peak of each kind\n");
    println!("{}\n", memory.planned.table(Some(&memory.peak)));
    let inputs = &memory.inputs;
    if inputs.host_peak > 0 {
        println!(
            "inputs of recomputed blocks: at most {} on the host and {} on the device; {} copied to the host\n",
            format_bytes(inputs.host_peak),
            format_bytes(inputs.device_peak),
            format_bytes(inputs.traffic.up),
        );
    }
    if let Some(blocks) = memory.peak_unsharded_units {
        println!("maximum number of blocks gathered at once: {blocks}");
    }
    if let Some(DriverMemory { used, total }) = memory.driver {
        let (used, total) = (format_bytes(used), format_bytes(total));
        println!("in use on the device by its driver: {used} of {total}\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron_train::metrics::Minimised;

    #[test]
    fn what_is_minimised_stands_under_the_held_out_loss() {
        let mut held_out = HeldOutMetrics {
            step: 3,
            loss: 1.5,
            bits_per_byte: 2.25,
            minimised: Minimised::default(),
            tokens: 16,
        };
        let plain = "held-out loss 1.5000 nats per byte (2.2500 bits) after 3 steps, on 16 tokens";
        let describe =
            |held_out: &HeldOutMetrics| describe_held_out(Some(held_out), LossUnit::Byte, 3);
        assert_eq!(describe(&held_out), plain);
        held_out.minimised = Minimised {
            further_tokens: None,
            objective: Some(1.75),
            label_smoothing: Some(0.125),
            z_loss: Some(0.125),
        };
        assert_eq!(
            describe(&held_out),
            format!(
                "{plain}\nobjective 1.7500 on the same tokens: the loss + label smoothing 0.1250 + z-loss 0.1250"
            )
        );
        (held_out.tokens, held_out.loss) = (0, f64::NAN);
        let none = "held-out loss: none, because all held-out targets are masked";
        assert_eq!(describe(&held_out), none);
        let none = "held-out loss: none, because nothing was evaluated";
        assert_eq!(describe_held_out(None, LossUnit::Byte, 3), none);
    }
}
