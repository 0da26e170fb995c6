//! The run of one rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::comm::{
    Communicator, ParallelContext, Rank, ReduceOp, all_gather_bytes, broadcast_bytes,
    broadcast_when_ready,
};
use burn_megatron::data_parallel::{ZeroStage, format_bytes};
use burn_megatron::device::{DeviceKind, check_results};
use burn_megatron::kernel_selection::{EpilogueFusion, Operation};
use burn_megatron::pipeline::trace::TraceEvent;
use burn_megatron_comm_testing::fault_injection::{Fault, FaultPlan as Faults, inject};
use burn_megatron_data::Dataset;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_train::run_folder::CHECKPOINTS;
use burn_megatron_train::{SaveConfig, Saver, TrainOutcome};

use crate::banner::{
    layout, print_aside, print_lora, print_model, print_offload, print_run, print_sharing,
    print_start,
};
use crate::determinism::{self, Pinned};
use crate::engines::print_engines;
use crate::epilogues::{self, EpilogueDecision};
use crate::error::Error;
use crate::estimate::{self, RankEstimates};
use crate::family::{AnyTrainer, RankMemory};
use crate::final_sample::{self, OnText};
use crate::fp8;
use crate::fp8::report::{self, OperandLine};
use crate::header::Header;
use crate::interrupt::Interrupt;
use crate::memory_limit::PlannedMemory;
use crate::metrics_writer::Recorder;
use crate::nodes::{self, LocalRank};
use crate::parallel_plan::ParallelPlan;
use crate::recipe::Recipe;
use crate::resume::{ResumePoint, StartDecision, StartResolver, TrainStart};
use crate::save_hf::HfSaver;
use crate::saving::SavingArgs;
use crate::slow_progress::phase;
use crate::weights::InitialWeights;
use crate::{consistency, data, gemm_algorithms, lora, resume_check, trace};

/// Inputs of every rank.
pub struct RankRun<'a> {
    pub recipe: &'a Recipe,
    pub plan: &'a ParallelPlan,
    /// The memory estimates.
    pub estimates: &'a RankEstimates,
    pub planned_memory: &'a PlannedMemory,
    pub data: &'a dyn Dataset,
    /// Decides the start of the run. Only on rank 0, which writes.
    pub resolver: Option<&'a StartResolver<'a>>,
    /// The flags of loading and saving.
    pub saving: &'a SavingArgs,
    /// The initial weights.
    pub weights: &'a InitialWeights<'a>,
    /// The settings of the sample at the end.
    pub sample: &'a GenerateConfig,
    /// The tokenizer of the sample at the end, if one is generated.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The injected faults of all ranks.
    pub faults: &'a [Fault],
    /// The timeout of a collective.
    pub deadline: Duration,
    /// The interval at which rank 0 signals the other ranks while it looks for a checkpoint.
    pub heartbeat_interval: Duration,
    pub device: DeviceKind,
    /// The settings that a deterministic run fixes.
    pub deterministic: Option<&'a Pinned>,
    /// Whether the FP8 layers are measured in the last step.
    pub fp8_report: bool,
    /// Whether the details of the header are printed.
    pub verbose: bool,
    /// The position of a process on its machine.
    pub place: Option<LocalRank>,
}

/// Result of a rank.
pub struct RankResult {
    pub outcome: TrainOutcome,
    /// The generated text, on the ranks that generate it.
    pub sample: Option<String>,
    /// The trace of all ranks in the last step of a pipeline.
    pub events: Vec<TraceEvent>,
    /// The number of ranks.
    pub ranks: usize,
    pub memory: RankMemory,
    /// The loss scale at the end.
    pub loss_scale: f64,
    /// The report on the FP8 layers in the last step, if it was requested.
    pub fp8: Vec<OperandLine>,
    /// The injected faults of all ranks that did not fire.
    pub unfired_faults: Vec<String>,
    /// The engine description at the end, if it differs from the start: the copies to and from registered buffers of
    /// NCCL.
    pub engine: Option<String>,
}

impl RankRun<'_> {
    /// Trains if there are steps left. Rank 0 prints and writes.
    pub fn train(
        &self,
        rank: &Rank,
        device: &Device,
        interrupt: &Interrupt,
    ) -> Result<Option<RankResult>, Error> {
        check_results(device)?;
        let faults = Arc::new(Faults::new(self.faults.to_vec()).deadline(self.deadline));
        let world = if self.faults.is_empty() {
            rank.communicator()
        } else {
            inject(rank.communicator(), Arc::clone(&faults))
        };
        let Some(folder) = self.share_folder(rank, &*world)? else {
            return Ok(None);
        };
        let start = self.start()?;
        let from = share_start(start, &*world)?;
        consistency::check(&*world, self.recipe, self.data)?;
        let layout = nodes::in_nodes(&self.plan.layout, self.place, &*world)?;
        let algorithms = gemm_algorithms::share(self.recipe, device, &*world)?;
        let epilogues = epilogues::share(self.recipe, self.plan, device, &*world)?;
        let measured = epilogues
            .as_ref()
            .map(|epilogues| self.with_epilogues(epilogues, start))
            .transpose()?;
        let recipe = measured.as_ref().unwrap_or(self.recipe);
        let run = RankRun { recipe, ..*self };
        let groups = ParallelContext::from_world(&layout, world)?;
        let engine = rank.engine();
        if let Some(start) = start {
            let threads = Some(rank.compute_threads());
            let mut header = Header::new(self.verbose);
            print_run(
                &mut header,
                recipe,
                self.plan,
                self.data,
                self.device,
                (&engine[..], threads),
            );
            if let Some(nodes) = nodes::describe(groups.mesh(), &recipe.data_parallel) {
                header.detail("nodes", nodes);
            }
            determinism::print_header(&mut header, recipe, self.deterministic);
            if let Some(algorithms) = &algorithms {
                header.line("cublaslt", algorithms);
            }
            let memory = (self.estimates, self.planned_memory);
            if let Some(epilogues) = &epilogues {
                header.line("gelu", format!("epilogues {}", epilogues.line));
            }
            let device = (self.device, device);
            print_training(&mut header, recipe, memory, device);
            header.line("folder", start.folder.path().display().to_string());
            header.write(&start.folder)?;
            println!();
        }
        let builder = estimate::builder(recipe, &groups, device)?;
        let builder = builder.with_recompute(&recipe.memory.recompute())?;
        let config = recipe.train_config();
        let build = || recipe.model.trainer(builder, &config);
        let mut trainer = self.phase("creating the parameters", build)?;
        if !self.faults.is_empty() {
            trainer.inject(Arc::clone(&faults));
        }
        self.connect_if_tight(&groups)?;
        let load = || self.load(&mut *trainer, from.as_ref());
        self.phase("loading the weights", load)?;
        if start.is_some() {
            let load = lora::initial_weights(recipe, from.is_some());
            print_start(from.as_ref(), load);
        }
        if recipe.checkpoint.save {
            trainer.save_with(run.saver(folder, start, from.as_ref(), &groups)?);
        }
        if let Some(start) = start {
            print_aside(&start.folder)?;
        }
        let (pressed, asked) = (interrupt.clone(), rank.clone());
        let stop = move || pressed.pressed() || asked.stop_requested();
        let steps = recipe.train.steps;
        let first = trainer.steps();
        let mut recorder = Recorder::new(rank.rank(), first..steps, start, Box::new(stop))?
            .in_bits_per(data::unit(self.data).bits_unit())
            .recording(recipe)
            .evaluating_every(recipe.train.evaluate_every);
        let hf = start
            .map(|start| HfSaver::new(start.folder.path(), recipe, self.saving, self.deadline));
        let hf = hf.transpose()?.flatten();
        recorder = recorder.saving_hf(hf);
        if self.fp8_report {
            recorder = recorder.measuring(trainer.fp8());
        }
        interrupt.steps_begin();
        let outcome = trainer.fit(self.data, &mut recorder)?;
        let hf = recorder.finish();
        let unfired_faults = self.gather_unfired_faults(rank, &faults)?;
        // With ZeRO-3 and with split experts, each rank has a shard that every forward needs.
        let full = recipe.data_parallel.zero_stage == ZeroStage::Parameters
            || self.plan.layout.splits_experts();
        let has_model = full || groups.data().rank() == 0;
        // A model that diverged cannot generate. The run reports the divergence instead.
        let writes = has_model && !outcome.stopped && !outcome.has_diverged();
        let sample = match self.tokenizer {
            Some(tokenizer) => {
                let generate =
                    |on_text: OnText<'_>| trainer.generate(self.sample, tokenizer, on_text);
                let generate = writes.then_some(generate);
                let stop = || interrupt.pressed() || rank.stop_requested();
                final_sample::generate(&**groups.world(), generate, stop)?
            }
            None => None,
        };
        let sample = sample.map(|text| format!("{}{text}", self.sample.prompt));
        let events = (rank.size() > 1).then(|| trace::gather(rank, trainer.events()));
        let result = RankResult {
            outcome,
            sample,
            events: events.transpose()?.unwrap_or_default(),
            ranks: rank.size(),
            memory: trainer.memory()?,
            loss_scale: trainer.loss_scale(),
            fp8: report::gather(&**groups.world(), trainer.fp8().report())?,
            unfired_faults,
            engine: Some(rank.engine()).filter(|ended| *ended != engine),
        };
        // No other rank waits for this rank any more.
        hf.map_or(Ok(()), |mut hf| hf.wait())?;
        Ok(Some(result))
    }

    /// Runs a phase that may take long. Rank 0 shows its name.
    fn phase<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        match self.resolver {
            Some(_) => phase(name, work),
            None => work(),
        }
    }

    /// Connects the process groups early if a rank plans to use most of its GPU. After the first forward, NCCL may
    /// find no memory for them. Collective: call on all ranks.
    fn connect_if_tight(&self, groups: &ParallelContext) -> Result<(), Error> {
        let world = groups.world();
        if self.device != DeviceKind::Cuda || world.size() == 1 {
            return Ok(());
        }
        let memory = self.device.memory();
        let is_tight = memory.is_some_and(|bytes| self.planned_memory.is_tight(bytes));
        let any = world.all_reduce(vec![u8::from(is_tight)].into(), ReduceOp::Max)?;
        if any == vec![1u8].into() {
            groups.connect()?;
        }
        Ok(())
    }

    /// Returns the recipe with the measured form of GELU. Rank 0 writes it to a new run folder, so that a resumed run
    /// keeps the form.
    fn with_epilogues(
        &self,
        epilogues: &EpilogueDecision,
        start: Option<&TrainStart>,
    ) -> Result<Recipe, Error> {
        let mut recipe = self.recipe.clone();
        recipe.kernels.epilogue_fusion = epilogues.fuse.into();
        if let Some(start) = start.filter(|start| start.config.is_none()) {
            start.folder.write_config(&recipe.complete())?;
        }
        Ok(recipe)
    }

    /// Decides the start of the run, on rank 0.
    fn start(&self) -> Result<Option<&TrainStart>, Error> {
        let decision = self.resolver.map(StartResolver::decision).transpose()?;
        Ok(decision.and_then(|decision| match decision {
            StartDecision::Train(start) => Some(&**start),
            StartDecision::Finished(_) => None,
        }))
    }

    /// Gathers on every rank the faults that did not fire. Collective: call on all ranks.
    fn gather_unfired_faults(&self, rank: &Rank, faults: &Faults) -> Result<Vec<String>, Error> {
        if self.faults.is_empty() {
            return Ok(vec![]);
        }
        let left = faults.not_triggered(rank.rank());
        let own: Vec<_> = left.iter().map(ToString::to_string).collect();
        // Use the plain communicator, so that the faults do not affect this collective.
        let all = all_gather_bytes(&*rank.communicator(), &serde_json::to_vec(&own)?)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice::<Vec<_>>(bytes));
        Ok(all.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Broadcasts the path of the run folder, which also receives the call logs. Returns `None` if no step is left.
    /// Ranks that are processes wait here while rank 0 looks for a checkpoint to resume from.
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
        let find = self.resolver.is_some().then_some(find);
        let path = broadcast_when_ready(world, find, 0, self.heartbeat_interval)??;
        let path = Some(String::from_utf8(path)?).filter(|path| !path.is_empty());
        if let Some(path) = &path {
            rank.write_call_logs_to(path);
        }
        Ok(path.map(PathBuf::from))
    }

    /// Loads the checkpoint or the initial weights.
    fn load(&self, trainer: &mut dyn AnyTrainer, from: Option<&ResumePoint>) -> Result<(), Error> {
        let leniency = self.saving.leniency();
        if let Some(weights) = self.weights.open(from.is_some())? {
            trainer.load_weights(weights, leniency)?;
        }
        let Some(from) = from else {
            return Ok(());
        };
        let checkpoint = Checkpoint::open(&from.path)?;
        trainer.load(&checkpoint, leniency)
    }

    /// Returns the saver for the run folder.
    fn saver(
        &self,
        folder: PathBuf,
        start: Option<&TrainStart>,
        from: Option<&ResumePoint>,
        groups: &ParallelContext,
    ) -> Result<Saver, Error> {
        let config = &self.recipe.checkpoint;
        let saving = SaveConfig {
            every: config.every,
            keep: config.retention(),
            asynchronous: config.asynchronous,
            deadline: self.deadline,
            layout: layout(self.recipe),
            config: resume_check::config(self.recipe, self.data)?,
            ..SaveConfig::into_folder(folder.join(CHECKPOINTS))
        };
        let saver = Saver::open(saving, groups)?;
        if let Some(from) = from.filter(|from| from.is_own) {
            let passed = start.map(|start| &start.passed[..]).unwrap_or_default();
            saver.prepare_resume(from.step, passed, self.saving.discard_later)?;
        }
        Ok(saver)
    }
}

/// Adds the model, its kernels and its memory to the header.
pub fn print_training(
    header: &mut Header,
    recipe: &Recipe,
    (estimates, planned_memory): (&RankEstimates, &PlannedMemory),
    (kind, device): (DeviceKind, &Device),
) {
    let own = estimates.first();
    print_model(
        header,
        recipe,
        estimates.parameters,
        own.parameters,
        own.flops_per_token,
    );
    print_lora(header, recipe, estimates.trained, estimates.parameters);
    let (config, data) = (&recipe.data_parallel, recipe.parallel.data_parallel_size());
    print_sharing(header, config, data, &own.sharing.layout);
    print_offload(header, &own.sharing.offload, &own.sharing.layout);
    let (mut kernels, optimizer) = (own.kernels.clone(), &recipe.train.optimizer);
    kernels.set_epilogue_fusion(recipe.kernels.epilogue_fusion);
    if recipe.kernels.epilogue_fusion == EpilogueFusion::Measured {
        header.line("gelu", "epilogues are measured when the run starts");
    }
    if !optimizer.is_adamw() {
        let reason = format!("{optimizer} steps by Burn's operations");
        kernels.prefer_unfused(Operation::Optimizer, reason);
    }
    header.line("kernels", kernels.summary());
    header.detail("", kernels.to_string());
    print_engines(header, kind, device, &own.kernels);
    if fp8::is_on(&recipe.fp8) {
        let engine = burn_megatron::kernels::fp8::engine_of_fp8(device);
        let fp8 = fp8::describe(&recipe.fp8, recipe.model.layers(), &engine);
        header.line("fp8", fp8);
    }
    let recompute = recipe.memory.recompute();
    let recomputed = if recompute.is_on() {
        format!("; the backward recomputes {}", recompute.describe())
    } else {
        String::new()
    };
    let offload = recompute.offload;
    if offload.bytes > 0 {
        let text = format!(
            "inputs of recomputed blocks on the host, at most {} per rank; fetched {} ahead",
            format_bytes(offload.bytes),
            offload.prefetch,
        );
        header.detail("offload", text);
    }
    header.table(&format!(
        "memory of rank 0, without activations{recomputed}\n\n{}",
        own.sharing.memory
    ));
    header.line("memory", planned_memory.to_string());
}

/// Broadcasts the checkpoint to resume from.
fn share_start(
    start: Option<&TrainStart>,
    world: &dyn Communicator,
) -> Result<Option<ResumePoint>, Error> {
    let own = start.map(|start| &start.from);
    let shared = broadcast_bytes(world, &serde_json::to_vec(&own)?, 0)?;
    Ok(serde_json::from_slice(&shared)?)
}
