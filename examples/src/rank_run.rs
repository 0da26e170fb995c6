//! The run of one rank.

use burn::tensor::{DType, Device};
use burn_megatron::comm::{Buffer, CommError, Groups, Rank, ReduceOp};
use burn_megatron::data::TextData;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::nn::Scope;
use burn_megatron::pipeline::engine::Event;
use burn_megatron::train::run_folder::RunFolder;
use burn_megatron::train::{LanguageModel, Outcome, Pipeline, Trainer};
use burn_megatron_models::Transformer;

use crate::header::print_model;
use crate::interrupt::Interrupt;
use crate::recipe::{Error, Plan, Recipe};
use crate::record::Recorder;

/// What every rank works with.
pub struct RankRun<'a> {
    pub recipe: &'a Recipe,
    pub plan: &'a Plan,
    pub text: &'a TextData,
    pub folder: &'a RunFolder,
}

/// What a rank brings back.
pub struct RankResult {
    pub outcome: Outcome,
    /// The text of the model, on the ranks that wrote it.
    pub sample: Option<Vec<u8>>,
    /// What it did in the last step of a pipeline.
    pub events: Vec<Event>,
}

impl RankRun<'_> {
    /// Trains; rank 0 shows and writes.
    pub fn train(
        &self,
        rank: &Rank,
        device: &Device,
        interrupt: &Interrupt,
        print_run: impl Fn(),
    ) -> Result<RankResult, Error> {
        let recipe = self.recipe;
        let groups = Groups::new(&self.plan.layout, rank)?;
        let mut trainer = self.trainer(&groups, device)?;
        let parameters = count_parameters(&groups, &trainer)?;
        if rank.rank() == 0 {
            let length = recipe.train.sequence_length.unwrap_or(recipe.model.context);
            let ddp = trainer.model();
            let own = ddp.table().local_elements(groups.place());
            print_run();
            print_model(
                recipe,
                parameters,
                own,
                ddp.module().flops_per_token(length),
            );
            println!("kernels  {}", ddp.kernels());
            println!("folder   {}\n", self.folder.path().display());
        }
        let mut recorder = Recorder::new(rank.rank(), recipe.train.steps, self.folder, interrupt)?;
        let outcome = trainer.fit(self.text, &mut recorder)?;
        recorder.finish();
        // Parameters that are sharded are gathered by all ranks.
        let alone = trainer.model().config().zero_stage < ZeroStage::Parameters;
        let writes = groups.data().rank() == 0 || !alone;
        let writes = writes && !outcome.stopped && recipe.sample.tokens > 0;
        let sample = writes
            .then(|| trainer.generate(&recipe.sample))
            .transpose()?;
        Ok(RankResult {
            outcome,
            sample,
            events: trainer.events().to_vec(),
        })
    }

    fn trainer(&self, groups: &Groups, device: &Device) -> Result<Trainer<Transformer>, Error> {
        let (model, train) = (&self.recipe.model, &self.recipe.train);
        let sequence_parallel = self.recipe.parallel.sequence_parallel;
        let scope = Scope::with(groups, device, train.seed, DType::F32)
            .with_kernels(&self.recipe.kernels)?;
        let Some(schedule) = &self.plan.schedule else {
            let model = model.init(scope, sequence_parallel)?;
            return Ok(Trainer::new(model, groups, device, train)?);
        };
        let own = schedule.stages_of(groups.pipeline().rank()).into_iter();
        let own: Vec<_> = own
            .map(|stage| (stage, self.plan.stages[stage].clone()))
            .collect();
        let model = model.init_stages(scope, sequence_parallel, &own)?;
        let pipeline = Pipeline {
            schedule: schedule.clone(),
            defer_embedding_wgrad: self.recipe.parallel.defer_embedding_wgrad,
        };
        Ok(Trainer::with_pipeline(
            model, groups, device, train, pipeline,
        )?)
    }
}

/// The parameters of the whole model, each counted once; every rank must come.
fn count_parameters(groups: &Groups, trainer: &Trainer<Transformer>) -> Result<usize, CommError> {
    let first = groups.pipeline().rank() == 0;
    let entries = trainer.model().table().entries().iter();
    let counted = entries.filter(|entry| first || !entry.at_both_ends);
    let own: usize = counted.map(|entry| entry.len()).sum();
    match groups
        .pipeline()
        .all_reduce(Buffer::from(vec![own as i64]), ReduceOp::Sum)?
    {
        Buffer::I64(sum) => Ok(sum[0] as usize),
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    }
}
