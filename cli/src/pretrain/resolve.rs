//! Applies the flags of `pretrain` to the recipe that they name.

use std::path::Path;

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::comm::Launch;
use burn_megatron::kernel_selection::EpilogueFusion;
use burn_megatron::mesh::{ContextExchange, ContextSplit, ParallelConfig};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::regular_file::is_there;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::is_peft_folder;
use toml::Table;

use super::args::{DataRanks, PretrainArgs};
use crate::error::Error;
use crate::family::{Families, base_of};
use crate::layers::{LayeredRecipe, RecipeLayers, table_of};
use crate::origins::Origin;
use crate::recipe::Recipe;
use crate::resume_mode::ResumeMode;
use crate::{data, lora};

impl Recipe {
    /// The recipe of a command line, and where its values are from.
    ///
    /// `default_recipe` is the TOML text of the recipe that `--recipe` overrides.
    ///
    /// # Errors
    /// Files that cannot be read, flags that do not apply, and keys that are set twice.
    pub fn resolve(
        args: &PretrainArgs,
        families: &Families,
        default_recipe: &str,
    ) -> Result<LayeredRecipe, Error> {
        let mode = ResumeMode::of(args)?;
        let first = mode.recipe(families)?;
        let flags = training_flags(args);
        let layers = RecipeLayers::new(families, default_recipe, &args.set)
            .with_file(args.recipe.as_deref())
            .with_weights(args.saving.load.as_deref())
            .resuming(mode.path().zip(first.as_ref()))
            .with_flags(&flags);
        let mut layered = layers.read()?;
        if let Some(first) = first
            .as_ref()
            .filter(|_| mode.is_own(args.run_dir.as_deref()))
        {
            go_on_saving(args, &mut layered.recipe, first)?;
        }
        let before = layered.recipe.clone();
        apply_flags(args, &mut layered.recipe)?;
        layered.origins.record_flags(&before, &layered.recipe)?;
        if let Some((first, path)) = first.as_ref().zip(mode.path()) {
            keep_measured(&mut layered, first, path);
        }
        if first.is_none() {
            fill_in(&mut layered)?;
        }
        lora::set_base(&mut layered.recipe, args.saving.load.as_deref())?;
        Ok(layered)
    }
}

/// Keeps what the run that is resumed has measured, so that it goes on with the same bits.
fn keep_measured(layered: &mut LayeredRecipe, first: &Recipe, path: &Path) {
    let own = &mut layered.recipe.kernels.epilogue_fusion;
    let measured = first.kernels.epilogue_fusion;
    if *own == EpilogueFusion::Measured && measured != EpilogueFusion::Measured {
        *own = measured;
        let origin = Origin::Resumed(path.into());
        layered.origins.derive("kernels.epilogue_fusion", origin);
    }
}

/// The flags of keys that others follow.
fn training_flags(args: &PretrainArgs) -> Table {
    let mut train = Table::new();
    if let Some(steps) = args.steps.map(i64::try_from) {
        train.insert("steps".into(), steps.unwrap_or(i64::MAX).into());
    }
    if let Some(peak) = args.lr {
        train.insert("learning_rate".into(), peak.into());
    }
    Table::from_iter([("train".to_string(), train.into())])
}

/// A run that is resumed in its own folder saves no less than before.
fn go_on_saving(args: &PretrainArgs, recipe: &mut Recipe, first: &Recipe) -> Result<(), Error> {
    if args.saving.no_save && first.checkpoint.save {
        return Err(
            "--no-save would discard the result of a run that saves checkpoints; remove it, or resume into another \
             folder (--run-dir)"
                .into(),
        );
    }
    recipe.checkpoint = recipe.checkpoint.clone().continue_from(&first.checkpoint);
    Ok(())
}

/// Applies the other flags.
fn apply_flags(args: &PretrainArgs, recipe: &mut Recipe) -> Result<(), Error> {
    let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
    set(&mut recipe.parallel.tensor, args.tensor_parallel);
    if let Some(DataRanks::Number(data)) = args.data_parallel {
        recipe.parallel.data = Some(data);
    }
    if let Some(context) = args.context_parallel {
        recipe.parallel.context = context;
        if context == 1 {
            // The context settings of the recipe no longer apply.
            recipe.parallel.context_split = ContextSplit::default();
            recipe.parallel.context_exchange = None;
            recipe.parallel.context_inner = None;
            recipe.parallel.context_narrow_gradients = false;
        }
    }
    if let Some(exchange) = &args.context_exchange {
        recipe.parallel.context_exchange = Some(exchange.parse()?);
        if recipe.parallel.context_exchange != Some(ContextExchange::Hierarchical) {
            recipe.parallel.context_inner = None;
        }
    }
    if let Some(hybrid) = args.hybrid_context_parallel {
        recipe.parallel.hybrid_context_parallel = hybrid;
        if !hybrid {
            // The size of the recipe no longer applies.
            recipe.parallel.max_seqlen_per_dp_cp_rank = None;
        }
    }
    if args.max_seqlen_per_dp_cp_rank.is_some() {
        recipe.parallel.max_seqlen_per_dp_cp_rank = args.max_seqlen_per_dp_cp_rank;
    }
    set(&mut recipe.parallel.expert, args.expert_parallel);
    if args.expert_parallel == Some(1) {
        // The overlap of the recipe no longer applies.
        recipe.parallel.overlap_moe_expert_parallel_comm = false;
    }
    if let Some(overlap) = args.overlap_moe_expert_parallel_comm {
        recipe.parallel.overlap_moe_expert_parallel_comm = overlap;
    }
    if args.expert_tensor_parallel.is_some() {
        recipe.parallel.expert_tensor = args.expert_tensor_parallel;
    }
    let parallel = &mut recipe.parallel;
    parallel.ranks_per_node = args.ranks_per_node.or(parallel.ranks_per_node);
    if let Some(pipeline) = args.pipeline_parallel {
        recipe.parallel.pipeline = pipeline;
        if pipeline == 1 {
            // The pipeline settings of the recipe no longer apply.
            recipe.parallel.schedule = None;
            recipe.parallel.virtual_stages = None;
            recipe.parallel.split = LayerSplit::Even;
            recipe.parallel.defer_embedding_wgrad = None;
            recipe.parallel.receives_ahead = None;
            recipe.parallel.fp8_transfers = false;
        }
    }
    if let Some(schedule) = &args.pipeline_schedule {
        recipe.parallel.schedule = Some(schedule.parse()?);
        recipe.parallel.virtual_stages = None;
    }
    if args.defer_embedding_wgrad.is_some() {
        recipe.parallel.defer_embedding_wgrad = args.defer_embedding_wgrad;
    }
    if args.receives_ahead.is_some() {
        recipe.parallel.receives_ahead = args.receives_ahead;
    }
    recipe.parallel.fp8_transfers = args.fp8_transfers.unwrap_or(recipe.parallel.fp8_transfers);
    if args.virtual_stages.is_some() {
        recipe.parallel.virtual_stages = args.virtual_stages;
    }
    if args.data_parallel == Some(DataRanks::Auto) {
        let started = Launch::from_env()?.map(|launch| launch.world_size);
        recipe.parallel.data = Some(data_ranks(&recipe.parallel, started)?);
    }
    set(&mut recipe.train.micro_batch_size, args.micro_batch_size);
    set(&mut recipe.train.global_batch_size, args.global_batch_size);
    if let Some(micro_batches) = args.micro_batches {
        let (batch, ranks) = (
            recipe.train.global_batch_size,
            recipe.parallel.data_size().max(1),
        );
        recipe.train.micro_batch_size = micro_batch_size(batch, ranks, micro_batches)?;
    }
    recipe.parallel.sequence_parallel = args
        .sequence_parallel
        .unwrap_or(recipe.parallel.sequence_parallel);
    tp_comm_overlap(args, &mut recipe.parallel)?;
    recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
    recipe.train.clip = args.clip.unwrap_or(recipe.train.clip);
    for choices in &args.kernels {
        recipe.kernels.set(choices)?;
    }
    recipe.kernels.loss_chunk_size = args.loss_chunk_size.or(recipe.kernels.loss_chunk_size);
    recipe.train.cuda_graph = args.cuda_graph.unwrap_or(recipe.train.cuda_graph);
    args.qk_clip.apply(recipe);
    args.determinism.apply(recipe);
    args.sharing.apply(recipe);
    args.fp8.apply(&mut recipe.fp8, &mut recipe.data_parallel);
    args.memory.apply(&mut recipe.memory);
    args.ranks.nccl.apply(&mut recipe.nccl);
    args.saving.apply(&mut recipe.checkpoint);
    args.data.apply(&mut recipe.data);
    if let Some(prompt) = &args.prompt {
        recipe.sample.prompt = prompt.clone();
    }
    Ok(())
}

/// The size of the data axis where a launcher `started` so many ranks.
fn data_ranks(parallel: &ParallelConfig, started: Option<usize>) -> Result<usize, Error> {
    let Some(started) = started else {
        return Err(
            "--data-parallel auto follows from the number of ranks that a launcher started, and there is none; give a \
             number"
                .into(),
        );
    };
    let replica = replica(parallel);
    if replica == 0 || !started.is_multiple_of(replica) {
        return Err(format!(
            "--data-parallel auto: {started} ranks were started, which is no multiple of {replica}, the ranks of tensor \
             x context x pipeline"
        )
        .into());
    }
    Ok(started / replica)
}

/// The ranks of one replica of the model.
pub fn replica(parallel: &ParallelConfig) -> usize {
    parallel.tensor * parallel.context * parallel.pipeline
}

/// Applies the flags of tensor-parallel overlap. Another method than that of the recipe does not have its number of chunks,
/// and where the flags turn sequence parallelism off, the settings of the recipe no longer apply.
fn tp_comm_overlap(args: &PretrainArgs, parallel: &mut ParallelConfig) -> Result<(), Error> {
    if args.sequence_parallel == Some(false) {
        (
            parallel.tp_comm_overlap,
            parallel.tp_comm_overlap_num_splits,
        ) = (None, None);
    }
    if let Some(name) = &args.tp_comm_overlap {
        let method = match name.as_str() {
            "none" => None,
            name => Some(name.parse()?),
        };
        if method != parallel.tp_comm_overlap {
            parallel.tp_comm_overlap_num_splits = None;
        }
        parallel.tp_comm_overlap = method;
    }
    let splits = args.tp_comm_overlap_num_splits;
    parallel.tp_comm_overlap_num_splits = splits.or(parallel.tp_comm_overlap_num_splits);
    Ok(())
}

/// Fills in what follows from the data and the weights, where it was not given.
fn fill_in(layered: &mut LayeredRecipe) -> Result<(), Error> {
    let LayeredRecipe { recipe, origins } = layered;
    let data = &mut recipe.data;
    if data.tokenizer.is_none()
        && data.files.is_empty()
        && let Some(load) = &recipe.checkpoint.load
        && let Some(tokenizer) = tokenizer_of(load)?
    {
        data.tokenizer = Some(tokenizer);
        origins.derive("data.tokenizer", Origin::Weights(load.clone()));
    }
    let has_vocabulary = table_of(&recipe.model)?.contains_key("vocabulary");
    if has_vocabulary
        && origins.is_default("model.vocabulary")
        && let Some(vocabulary) = data::known_vocabulary(recipe)?
        && vocabulary != recipe.model.vocabulary()
    {
        let vocabulary = i64::try_from(vocabulary)?;
        let settings = Table::from_iter([("vocabulary".to_string(), vocabulary.into())]);
        recipe.model = recipe.model.with_settings(settings)?;
        origins.derive("model.vocabulary", Origin::Tokenizer);
    }
    let data = &recipe.data;
    let is_own = data.path.is_some() || !data.files.is_empty() || data.chat.is_some();
    if is_own && origins.is_default("sample.prompt") {
        recipe.sample.prompt.clear();
        origins.derive("sample.prompt", Origin::Data);
    }
    Ok(())
}

/// The tokenizer of weights: in a Hugging Face folder, or the one that a checkpoint names.
fn tokenizer_of(weights: &Path) -> Result<Option<String>, Error> {
    if is_there(&weights.join("tokenizer.json")) {
        return Ok(weights.to_str().map(String::from));
    }
    if is_peft_folder(weights) {
        return tokenizer_of(&base_of(weights)?);
    }
    if is_hf_folder(weights) {
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(weights)?;
    let config = &checkpoint.metadata().config;
    Ok(config["data"]["tokenizer"].as_str().map(String::from))
}

/// The size of a micro-batch, given their number.
fn micro_batch_size(batch: usize, ranks: usize, micro_batches: usize) -> Result<usize, Error> {
    let Some(multiple) = ranks.checked_mul(micro_batches).filter(|n| *n > 0) else {
        return Err(format!(
            "invalid --micro-batches {micro_batches}: expected 1 to {}, the samples per rank",
            (batch / ranks).max(1)
        )
        .into());
    };
    let share = batch / ranks;
    if share == 0 || !share.is_multiple_of(micro_batches) {
        return Err(format!(
            "{share} samples per rank cannot be split into {micro_batches} micro-batches; set \
             --global-batch-size to a multiple of {multiple}"
        )
        .into());
    }
    Ok(share / micro_batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_axis_follows_from_the_ranks_that_were_started() {
        let parallel = ParallelConfig::new().with_tensor(2).with_pipeline(2);
        assert_eq!(data_ranks(&parallel, Some(12)).unwrap(), 3);
        let error = |started| data_ranks(&parallel, started).unwrap_err().to_string();
        assert!(error(Some(6)).contains("6 ranks were started, which is no multiple of 4"));
        assert!(error(None).ends_with("there is none; give a number"));
        for (text, ranks) in [
            ("auto", Some(DataRanks::Auto)),
            ("3", Some(DataRanks::Number(3))),
            ("-1", None),
        ] {
            assert_eq!(text.parse().ok(), ranks, "{text}");
        }
    }

    #[test]
    fn micro_batches_that_cannot_be_are_refused_with_what_can() {
        let error = |batch, ranks, count| match micro_batch_size(batch, ranks, count) {
            Ok(size) => panic!("{size}"),
            Err(error) => error.to_string(),
        };
        assert_eq!(micro_batch_size(16, 2, 4).unwrap(), 2);
        let none = "invalid --micro-batches 0: expected 1 to 8, the samples per rank";
        assert_eq!(error(16, 2, 0), none);
        assert!(error(16, 2, usize::MAX).contains("expected 1 to 8"));
        let share = "8 samples per rank cannot be split into 3 micro-batches; set \
                     --global-batch-size to a multiple of 6";
        assert_eq!(error(16, 2, 3), share);
        assert!(error(1, 2, 4).ends_with("a multiple of 8"));
    }
}
