//! The header of a run, printed before the first step.

use std::path::Path;

use burn_megatron::checkpoint::{CheckpointFolder, InactiveCheckpoint};
use burn_megatron::data_parallel::layout::BufferLayout;
use burn_megatron::data_parallel::{
    DataParallelConfig, Moments, OffloadPlan, ParameterGather, Precision, ZeroStage, format_bytes,
};
use burn_megatron::device::DeviceKind;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron_data::Dataset;
use burn_megatron_train::SequenceWarmup;
use burn_megatron_train::run_folder::RunFolder;
use indicatif::HumanBytes;

use crate::error::Error;
use crate::header::Header;
use crate::lora;
use crate::nccl;
use crate::numbers::{count, grouped};
use crate::parallel_plan::ParallelPlan;
use crate::recipe::Recipe;
use crate::resume::ResumePoint;
use crate::terminal::labelled;

/// Prints one line of the results of a run.
pub fn print(label: &str, text: impl AsRef<str>) {
    println!("{}", labelled(label, text.as_ref()));
}

/// Adds the ranks and the data to the header. `threads` is the number of compute threads per rank, if it is known.
pub fn print_run(
    header: &mut Header,
    recipe: &Recipe,
    plan: &ParallelPlan,
    data: &dyn Dataset,
    device: DeviceKind,
    (engine, threads): (&str, Option<usize>),
) {
    let mesh = plan.mesh.to_string();
    let (sizes, tables) = mesh.split_once('\n').unwrap_or((&mesh, ""));
    header.line("mesh", sizes.strip_prefix("mesh of ").unwrap_or(sizes));
    header.table(tables);
    let threads = threads.map_or(String::new(), |threads| {
        format!(", {} per rank", count(threads, "compute thread"))
    });
    header.line("engine", format!("{engine}; {device}{threads}"));
    if let Some(unused) = nccl::unused(&recipe.nccl, engine) {
        header.line("", unused);
    }
    if let Some(schedule) = &plan.schedule {
        let stages = plan
            .stages
            .iter()
            .map(|stage| stage.layers.len().to_string());
        let micro_batches = match schedule.micro_batches() {
            1 => "1 micro-batch".into(),
            number => format!("{number} micro-batches"),
        };
        header.line(
            "pipeline",
            format!(
                "{}: {} of {} layers, {}{}",
                schedule.name(),
                count(schedule.stages(), "stage"),
                stages.collect::<Vec<_>>().join(", "),
                micro_batches,
                if recipe.parallel.fp8_transfers {
                    ", FP8 transfers"
                } else {
                    ""
                },
            ),
        );
    }
    let (train, length) = (&recipe.train, recipe.sequence_length());
    if let Some(context) = context(recipe, length) {
        header.line("context", context);
    }
    header.line("data", data.describe());
    if train.held_out_samples == 0 {
        header.line("", "no evaluation, because train.held_out_samples is 0");
    } else if data
        .held_out(length, 1)
        .is_ok_and(|samples| samples.is_empty())
    {
        header.line("", "no evaluation, because nothing is held out");
    }
    for SequenceWarmup { until_step, length } in train.shorter_rows() {
        header.detail(
            "",
            format!("rows of {length} tokens until step {until_step}"),
        );
    }
    for part in train.smaller_batches() {
        let (size, until) = (part.global_batch_size, part.until_step);
        header.detail(
            "",
            format!("{} per step until step {until}", count(size, "sample")),
        );
    }
    let share = if recipe.parallel.hybrid_tokens().is_some() {
        "shared by the lengths of their documents".into()
    } else {
        let share = train.global_batch_size / recipe.parallel.data_size();
        let size = train.micro_batch_size;
        format!("{share} per rank in micro-batches of {size}")
    };
    header.line(
        "batch",
        format!(
            "{} of {}: {share}; {} per step, {}",
            count(train.global_batch_size, "sample"),
            count(length, "token"),
            count(train.global_batch_size * length, "token"),
            count(train.steps, "step"),
        ),
    );
}

/// Describes how the ranks of the context axis share sequences of this length, if there are several ranks.
fn context(recipe: &Recipe, length: usize) -> Option<String> {
    let parallel = &recipe.parallel;
    let exchange = recipe.model.context_exchange(parallel).ok().flatten()?;
    if let Some(tokens) = parallel.hybrid_tokens() {
        return Some(format!(
            "each document on 1 to {} ranks of context x data by its length, at most {} tokens per rank in a \
             micro-batch; attention by {exchange}",
            parallel.data_parallel_size(),
            grouped(tokens)
        ));
    }
    let chosen = match parallel.context_exchange {
        Some(_) => "",
        None => ", chosen by the sizes",
    };
    Some(format!(
        "{} ranks share each sequence, {} tokens each ({}); attention by {exchange}{chosen}",
        parallel.context,
        grouped(length / parallel.context),
        parallel.context_split,
    ))
}

/// Adds the size of the model to the header. `own` is the number of parameters of rank 0.
pub fn print_model(
    header: &mut Header,
    recipe: &Recipe,
    parameters: usize,
    own: usize,
    flops_per_token: f64,
) {
    let text = format!(
        "{}: {} parameters, {} on rank 0; {:.1} MFLOP per token",
        recipe.model.describe(),
        grouped(parameters),
        grouped(own),
        flops_per_token / 1e6,
    );
    header.line("model", text);
}

/// Adds the LoRA adapters of a model to the header, with the number of trained parameters. Adds nothing if the recipe
/// has no adapters.
pub fn print_lora(header: &mut Header, recipe: &Recipe, trained: usize, all: usize) {
    let Some(lora) = &recipe.lora else {
        return;
    };
    header.line("lora", describe_lora(lora, trained, all));
    if let Some(note) = lora::note_of_base(lora) {
        header.line("", note);
    }
}

fn describe_lora(lora: &LoraConfig, trained: usize, all: usize) -> String {
    let LoraConfig { rank, alpha, .. } = lora;
    let dropout = match lora.dropout {
        0.0 => String::new(),
        dropout => format!(", dropout {dropout}"),
    };
    format!(
        "rank {rank}, alpha {alpha}{}{dropout} on {}; trainable parameters: {} of {} ({:.2} %)",
        if lora.rslora { " / sqrt(rank)" } else { "" },
        lora.target_modules.join(", "),
        grouped(trained),
        grouped(all),
        100.0 * trained as f64 / all.max(1) as f64,
    )
}

/// Prints the checkpoint that the run resumes from, or the weights that it loads.
pub fn print_start(from: Option<&ResumePoint>, weights: Option<&Path>) {
    match (from, weights) {
        (Some(from), _) => {
            let path = from.path.display();
            print("resumed", format!("after step {}, {path}", from.step));
        }
        (None, Some(weights)) => print("weights", weights.display().to_string()),
        (None, None) => return,
    }
    println!();
}

/// Prints the checkpoints that were set aside in a run folder, one per line.
pub fn print_aside(folder: &RunFolder) -> Result<(), Error> {
    let checkpoints = folder.checkpoints();
    if !checkpoints.exists() {
        return Ok(());
    }
    for aside in CheckpointFolder::open(checkpoints)?.inactive()? {
        print("aside", describe_aside(&aside));
    }
    Ok(())
}

/// Describes a checkpoint that was set aside: its name, its size, and how long it is kept.
pub fn describe_aside(aside: &InactiveCheckpoint) -> String {
    let bytes = match aside.bytes {
        Some(bytes) => HumanBytes(bytes).to_string(),
        None => "of unknown size".to_string(),
    };
    let until = if aside.is_discarded {
        "removed when the next checkpoint is saved"
    } else {
        "kept until you remove it"
    };
    format!("{}, {bytes}: {until}", aside.name())
}

/// Returns the parallel layout as one line.
pub fn layout(recipe: &Recipe) -> String {
    let parallel = &recipe.parallel;
    let sequence = match (parallel.sequence_parallel, parallel.tp_comm_overlap) {
        (false, _) => String::new(),
        (true, None) => ", sequence".into(),
        (true, Some(method)) => format!(", sequence ({method} overlap)"),
    };
    let context = match parallel.context {
        1 => String::new(),
        ranks => format!(", context {ranks}"),
    };
    let virtual_stages = match parallel.virtual_stages {
        Some(stages) => format!(" x {stages} stages"),
        None => String::new(),
    };
    format!(
        "tensor {}{sequence}{context}, pipeline {}{virtual_stages}, data {}, ZeRO-{}",
        parallel.tensor,
        parallel.pipeline,
        parallel.data_size(),
        recipe.data_parallel.zero_stage,
    )
}

/// Adds the sharding over a data axis of `ranks` ranks, and the buckets of rank 0, to the header.
pub fn print_sharing(
    header: &mut Header,
    config: &DataParallelConfig,
    ranks: usize,
    layout: &BufferLayout,
) {
    let types = types(config);
    header.line("sharding", format!("{}; {types}", sharding(config, ranks)));
    let timing = timing(config, ranks);
    header.detail("buckets", format!("{}; {timing}", buckets(layout)));
}

/// Adds the host-offloaded optimizer state of rank 0 to the header, if there is any.
pub fn print_offload(header: &mut Header, offload: &OffloadPlan, layout: &BufferLayout) {
    if let Some(offload) = offloaded(offload, layout) {
        header.line("offload", offload);
    }
}

fn offloaded(offload: &OffloadPlan, layout: &BufferLayout) -> Option<String> {
    let OffloadPlan { buckets, up, down } = *offload;
    (buckets > 0).then(|| {
        format!(
            "optimizer state of {buckets} of {} buckets on the host; per step {} of gradients up, {} of parameters down",
            layout.bucket_count(),
            format_bytes(up),
            format_bytes(down),
        )
    })
}

fn sharding(config: &DataParallelConfig, ranks: usize) -> String {
    let what = match config.zero_stage {
        ZeroStage::Replicated => {
            return format!("none, {}", count(ranks, "replica"));
        }
        ZeroStage::Optimizer => "optimizer state",
        ZeroStage::Gradients => "optimizer state and gradients",
        ZeroStage::Parameters => "optimizer state, gradients and parameters",
    };
    let shards = config.shard_ranks(ranks);
    let copies = match ranks / shards {
        1 => String::new(),
        copies => format!(", {copies} replicas"),
    };
    format!(
        "ZeRO-{}, {what} over {shards} ranks{copies}",
        config.zero_stage
    )
}

fn types(config: &DataParallelConfig) -> String {
    let computes = match config.precision {
        Precision::F64 => "computes in f64",
        Precision::F32 => "computes in f32",
        Precision::Bf16 => "computes in bf16, master weights and gradient sums in f32",
        Precision::F16 => "computes in f16, master weights and gradient sums in f32",
    };
    let moments = match config.moments {
        Moments::F32 => "",
        Moments::Bf16 => ", moments in bf16",
    };
    let travel = if config.reduce_in_16_bits {
        ", gradients are sent in 16 bits"
    } else {
        ""
    };
    format!("{computes}{moments}{travel}")
}

fn buckets(layout: &BufferLayout) -> String {
    let sizes = || layout.buckets().map(|(_, _, bucket)| bucket.padded());
    let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
    let sizes = if least == most {
        grouped(most)
    } else {
        format!("{} to {}", grouped(least), grouped(most))
    };
    format!("{} of {sizes} elements on rank 0", layout.bucket_count())
}

/// Describes when buckets are reduced and gathered.
fn timing(config: &DataParallelConfig, ranks: usize) -> String {
    let stage = config.zero_stage;
    if ranks == 1 {
        return "nothing to reduce".into();
    }
    let sums = match (stage >= ZeroStage::Gradients, config.overlap_grad_reduce) {
        (true, true) => "reduced as soon as each is full",
        (true, false) => "reduced as soon as each is full, without overlap",
        (false, true) => "reduced as soon as each is ready",
        (false, false) => "reduced after the backward",
    };
    let gathers = match config.gathers() {
        ParameterGather::Never => "",
        ParameterGather::BeforeForward => ", prefetched one ahead and kept for backward",
        ParameterGather::BeforeUse => ", prefetched one ahead",
        ParameterGather::DuringForward => ", gathered during the next forward",
        ParameterGather::AfterStep => ", gathered after the step",
    };
    format!("{sums}{gathers}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::DType::F32;
    use burn_megatron::data_parallel::layout::{BucketRules, ParameterSize};
    use insta::assert_snapshot;

    #[test]
    fn the_header_says_what_is_trained() {
        let lora = LoraConfig {
            alpha: 16.0,
            dropout: 0.1,
            ..LoraConfig::default()
        };
        assert_snapshot!(
            describe_lora(&lora, 1024, 1_000_000),
            @"rank 8, alpha 16, dropout 0.1 on q_proj, v_proj; trainable parameters: 1,024 of 1,000,000 (0.10 %)"
        );
    }

    fn config(stage: u8) -> DataParallelConfig {
        DataParallelConfig {
            zero_stage: ZeroStage::try_from(stage).unwrap(),
            ..DataParallelConfig::default()
        }
    }

    #[test]
    fn the_header_says_what_is_shared() {
        let shared = |stage| sharding(&config(stage), 4);
        assert_snapshot!(shared(0), @"none, 4 replicas");
        assert_snapshot!(sharding(&config(0), 1), @"none, 1 replica");
        assert_snapshot!(shared(1), @"ZeRO-1, optimizer state over 4 ranks");
        assert_snapshot!(
            shared(3),
            @"ZeRO-3, optimizer state, gradients and parameters over 4 ranks"
        );
        let hybrid = DataParallelConfig {
            hsdp: Some(2),
            ..config(2)
        };
        let found = sharding(&hybrid, 4);
        assert_snapshot!(found, @"ZeRO-2, optimizer state and gradients over 2 ranks, 2 replicas");
    }

    #[test]
    fn the_header_says_which_types_and_when() {
        let narrow = DataParallelConfig {
            precision: Precision::Bf16,
            moments: Moments::Bf16,
            reduce_in_16_bits: true,
            overlap_param_gather: true,
            ..config(1)
        };
        assert_snapshot!(
            types(&narrow),
            @"computes in bf16, master weights and gradient sums in f32, moments in bf16, gradients \
              are sent in 16 bits"
        );
        let early = "reduced as soon as each is ready, gathered during the next forward";
        assert_eq!(timing(&narrow, 4), early);
        let late = DataParallelConfig {
            overlap_grad_reduce: false,
            ..config(0)
        };
        assert_snapshot!(timing(&late, 4), @"reduced after the backward");
        assert_snapshot!(timing(&late, 1), @"nothing to reduce");
        assert_snapshot!(
            timing(&config(3), 2),
            @"reduced as soon as each is full, prefetched one ahead"
        );
    }

    #[test]
    fn the_header_says_how_large_buckets_are() {
        let size = |elements| ParameterSize {
            elements,
            parameter: F32,
            gradient: F32,
            grid: burn_megatron::mesh::Grid::Dense,
            shared: false,
            unit: 0,
            quantized_bytes: None,
        };
        let rules = BucketRules {
            size: Some(1),
            ..BucketRules::sharded(2)
        };
        let of = |sizes: &[usize]| {
            let sizes: Vec<_> = sizes.iter().map(|elements| size(*elements)).collect();
            buckets(&BufferLayout::new(&sizes, &rules).unwrap())
        };
        assert_snapshot!(of(&[100, 3000]), @"2 of 128 to 3,072 elements on rank 0");
        assert_snapshot!(of(&[100]), @"1 of 128 elements on rank 0");
        let layout = BufferLayout::new(&[100, 3000].map(size), &rules).unwrap();
        let plan = |buckets| OffloadPlan {
            buckets,
            up: 12_288,
            down: 6144,
        };
        assert_eq!(offloaded(&plan(0), &layout), None);
        assert_snapshot!(
            offloaded(&plan(1), &layout).unwrap(),
            @"optimizer state of 1 of 2 buckets on the host; per step 12.00 KiB of gradients up, 6.00 KiB of parameters \
              down"
        );
    }
}
