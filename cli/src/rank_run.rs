//! The run of one rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::choice::Operation;
use burn_megatron::comm::testing::inject::{Fault, Plan as Faults, inject};
use burn_megatron::comm::{
    Communicator, Groups, Rank, all_gather_bytes, broadcast_bytes, broadcast_made,
};
use burn_megatron::data::Dataset;
use burn_megatron::data_parallel::{DistributedDataParallel, MemoryPlan, ZeroStage};
use burn_megatron::device::DeviceKind;
use burn_megatron::pipeline::trace::TraceEvent;
use burn_megatron::tokenizer::Tokenizer;
use burn_megatron::train::run_folder::{CHECKPOINTS, RunFolder};
use burn_megatron::train::{Outcome, Pipeline, Saver, Saving, Trainer};
use burn_megatron_models::Transformer;

use crate::fp8;
use crate::fp8::report::{self, Line};
use crate::header::{layout, print_aside, print_model, print_run, print_sharing, print_start};
use crate::interrupt::Interrupt;
use crate::outline::{self, Outlines};
use crate::recipe::{Error, Plan, Recipe};
use crate::record::Recorder;
use crate::saving::SavingArgs;
use crate::start::{Begin, Begun, From, Start};
use crate::{agree, changes, data, trace};

/// What every rank works with.
pub struct RankRun<'a> {
    pub recipe: &'a Recipe,
    pub plan: &'a Plan,
    /// What it will hold.
    pub outlines: &'a Outlines,
    pub data: &'a dyn Dataset,
    /// On rank 0, which writes.
    pub begin: Option<&'a Begin<'a>>,
    /// How strictly is loaded.
    pub saving: &'a SavingArgs,
    /// What the run begins with, where that is not random.
    pub weights: Option<&'a dyn TensorSource>,
    /// Of the text at the end, where one is written.
    pub tokenizer: Option<&'a Tokenizer>,
    /// What goes wrong on purpose, on any rank.
    pub faults: &'a [Fault],
    /// How long a call waits.
    pub deadline: Duration,
    /// How often rank 0 tells the others that it still looks for a checkpoint.
    pub beat: Duration,
    pub device: DeviceKind,
    /// Whether the 8-bit layers are measured in the last step.
    pub fp8_report: bool,
}

/// What a rank brings back.
pub struct RankResult {
    pub outcome: Outcome,
    /// The text of the model, on the ranks that wrote it.
    pub sample: Option<String>,
    /// What all ranks did in the last step of a pipeline.
    pub events: Vec<TraceEvent>,
    /// The number of ranks.
    pub ranks: usize,
    pub memory: Memory,
    /// What the loss was multiplied with at the end.
    pub loss_scale: f64,
    /// What the 8-bit layers did in the last step, where it was asked for.
    pub fp8: Vec<Line>,
    /// The faults of all ranks that have not struck.
    pub not_struck: Vec<String>,
}

/// What a rank holds of the training state.
pub struct Memory {
    pub planned: MemoryPlan,
    /// The most of each kind.
    pub peak: MemoryPlan,
    /// The most blocks that were gathered at once, under full sharding.
    pub most_blocks: Option<u64>,
    /// Whether the state of the optimizer is in the peak.
    pub counts_optimizer: bool,
}

impl Memory {
    fn of(ddp: &DistributedDataParallel<Transformer>) -> Result<Self, Error> {
        let usage = ddp.usage();
        let full = ddp.config().zero_stage == ZeroStage::Parameters;
        Ok(Self {
            planned: ddp.memory_plan()?,
            peak: usage.peak(),
            counts_optimizer: ddp.kernels().is_fused(Operation::Optimizer),
            most_blocks: full.then(|| usage.most_blocks()),
        })
    }
}

impl RankRun<'_> {
    /// Trains, where there are steps to make; rank 0 shows and writes.
    pub fn train(
        &self,
        rank: &Rank,
        device: &Device,
        interrupt: &Interrupt,
    ) -> Result<Option<RankResult>, Error> {
        let recipe = self.recipe;
        let faults = Arc::new(Faults::new(self.faults.to_vec()).deadline(self.deadline));
        let world = match self.faults.is_empty() {
            true => rank.communicator(),
            false => inject(rank.communicator(), Arc::clone(&faults)),
        };
        let Some(folder) = self.share_folder(rank, &*world)? else {
            return Ok(None);
        };
        let start = self.start()?;
        let from = share_start(start, &*world)?;
        agree::check(&*world, recipe, self.data)?;
        let groups = Groups::checked(&self.plan.layout, world)?;
        if let Some(start) = start {
            print_run(recipe, self.plan, self.data, self.device, rank);
            self.print_training(&start.folder, device);
        }
        let mut trainer = self.trainer(&groups, device)?;
        self.load(&mut trainer, from.as_ref())?;
        if start.is_some() {
            print_start(from.as_ref(), self.saving.load.as_deref());
        }
        if recipe.checkpoint.save {
            trainer.save_with(self.saver(folder, start, from.as_ref(), &groups)?);
        }
        if let Some(start) = start {
            print_aside(&start.folder)?;
        }
        let (pressed, asked) = (interrupt.clone(), rank.clone());
        let stop = move || pressed.pressed() || asked.stop_requested();
        let steps = recipe.train.steps;
        let first = trainer.steps();
        let mut recorder = Recorder::new(rank.rank(), first..steps, start, Box::new(stop))?
            .in_bits_per(data::unit(self.data).of_bits());
        if self.fp8_report {
            recorder = recorder.measuring(trainer.model().fp8());
        }
        interrupt.steps_begin();
        let outcome = trainer.fit(self.data, &mut recorder)?;
        recorder.finish();
        let not_struck = self.gather_left(rank, &faults)?;
        // Under full sharding each rank has a part of what every forward needs.
        let full = recipe.data_parallel.zero_stage == ZeroStage::Parameters;
        let has_model = full || groups.data().rank() == 0;
        // A model that diverged has nothing to say: the run ends with that, and not with a text that fails.
        let writes = has_model && !outcome.stopped && !outcome.has_diverged();
        let sample = self
            .tokenizer
            .filter(|_| writes)
            .map(|tokenizer| trainer.generate(&recipe.sample, tokenizer))
            .transpose()?;
        let sample = sample.map(|sample| format!("{}{}", recipe.sample.prompt, sample.text));
        let is_pipeline = self.plan.schedule.is_some();
        let events = is_pipeline.then(|| trace::gather(&**groups.world(), trainer.events()));
        Ok(Some(RankResult {
            outcome,
            sample,
            events: events.transpose()?.unwrap_or_default(),
            ranks: rank.size(),
            memory: Memory::of(trainer.model())?,
            loss_scale: trainer.scaler().scale(),
            fp8: report::gather(&**groups.world(), trainer.model().fp8().report())?,
            not_struck,
        }))
    }

    /// Where the run begins, on rank 0.
    fn start(&self) -> Result<Option<&Start>, Error> {
        let begun = self.begin.map(Begin::begun).transpose()?;
        Ok(begun.and_then(|begun| match begun {
            Begun::Run(start) => Some(&**start),
            Begun::Over(_) => None,
        }))
    }

    /// The faults of all ranks that have not struck, on every rank; all must come.
    fn gather_left(&self, rank: &Rank, faults: &Faults) -> Result<Vec<String>, Error> {
        if self.faults.is_empty() {
            return Ok(vec![]);
        }
        let left = faults.left(rank.rank());
        let own: Vec<_> = left.iter().map(ToString::to_string).collect();
        // Not through the faults themselves.
        let all = all_gather_bytes(&*rank.communicator(), &serde_json::to_vec(&own)?)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice::<Vec<_>>(bytes));
        Ok(all.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Lets every rank know where the run folder is, and where call logs go; nothing where no step is left.
    /// Ranks may be processes, which wait here while rank 0 looks for a checkpoint to go on from.
    fn share_folder(
        &self,
        rank: &Rank,
        world: &dyn Communicator,
    ) -> Result<Option<PathBuf>, Error> {
        let find = || {
            let path = self.start()?.map(|start| start.folder.path().as_os_str());
            let bytes = path.map(|path| path.as_encoded_bytes().to_vec());
            Ok::<_, Error>(bytes.unwrap_or_default())
        };
        let find = self.begin.is_some().then_some(find);
        let path = broadcast_made(world, find, 0, self.beat)??;
        let path = Some(String::from_utf8(path)?).filter(|path| !path.is_empty());
        if let Some(path) = &path {
            rank.write_call_logs_to(path);
        }
        Ok(path.map(PathBuf::from))
    }

    /// Loads what the run goes on from, or begins with.
    fn load(&self, trainer: &mut Trainer<Transformer>, from: Option<&From>) -> Result<(), Error> {
        let leniency = self.saving.leniency();
        if let Some(weights) = self.weights {
            trainer.load_weights(weights, leniency)?;
        }
        let Some(from) = from else { return Ok(()) };
        let checkpoint = Checkpoint::open(&from.path)?;
        Ok(trainer.load(&checkpoint, leniency)?)
    }

    /// What saves the run in its folder.
    fn saver(
        &self,
        folder: PathBuf,
        start: Option<&Start>,
        from: Option<&From>,
        groups: &Groups,
    ) -> Result<Saver, Error> {
        let config = &self.recipe.checkpoint;
        let saving = Saving {
            every: config.every,
            keep: config.retention(),
            asynchronous: config.asynchronous,
            deadline: self.deadline,
            layout: layout(self.recipe),
            config: changes::config(self.recipe, self.data)?,
            ..Saving::into_folder(folder.join(CHECKPOINTS))
        };
        let saver = Saver::open(saving, groups)?;
        if let Some(from) = from.filter(|from| from.is_own) {
            let passed = start.map(|start| &start.passed[..]).unwrap_or_default();
            saver.go_on_from(from.step, passed, self.saving.discard_later)?;
        }
        Ok(saver)
    }

    fn print_training(&self, folder: &RunFolder, device: &Device) {
        let (recipe, outlines) = (self.recipe, self.outlines);
        let own = outlines.first();
        print_model(
            recipe,
            outlines.parameters,
            own.parameters,
            own.flops_per_token,
        );
        let (config, data) = (&recipe.data_parallel, recipe.parallel.data);
        print_sharing(config, data, &own.sharing.layout);
        println!("kernels  {}", own.kernels);
        if fp8::is_on(&recipe.fp8) {
            let engine = burn_megatron::kernels::fp8::engine_of_fp8(device);
            println!(
                "fp8      {}",
                fp8::describe(&recipe.fp8, recipe.model.layers, &engine)
            );
        }
        println!("folder   {}", folder.path().display());
        println!("memory   of rank 0, without activations\n");
        println!("{}\n", own.sharing.memory);
    }

    fn trainer(&self, groups: &Groups, device: &Device) -> Result<Trainer<Transformer>, Error> {
        let train = &self.recipe.train_config();
        let model = outline::build(self.recipe, self.plan, groups, device, false)?;
        let Some(schedule) = &self.plan.schedule else {
            return Ok(Trainer::new(model, groups, device, train)?);
        };
        let pipeline = Pipeline {
            schedule: schedule.clone(),
            defer_embedding_wgrad: self.recipe.parallel.defer_embedding_wgrad,
        };
        Ok(Trainer::with_pipeline(
            model, groups, device, train, pipeline,
        )?)
    }
}

/// Lets every rank know where the run goes on.
fn share_start(start: Option<&Start>, world: &dyn Communicator) -> Result<Option<From>, Error> {
    let own = start.map(|start| &start.from);
    let shared = broadcast_bytes(world, &serde_json::to_vec(&own)?, 0)?;
    Ok(serde_json::from_slice(&shared)?)
}
