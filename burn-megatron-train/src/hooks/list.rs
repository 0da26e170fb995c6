//! The ordered list of the hooks of a trainer.

use std::any::Any;

use burn_megatron_kernels::adamw::outcome::statistics_dtype;

use super::attention_logits::AttentionLogitLimit;
use super::cuda_graphs::CudaGraphs;
use super::ema::AverageWeights;
use super::expert_load::{ExpertLoad, Routers};
use super::fp8_scales::Fp8Scales;
use super::hybrid_context::HybridContextHook;
use super::replay::Replay;
use super::replica_check::ReplicaCheck;
use super::router_bias::RouterBias;
use super::spikes::SkipSpikes;
use super::zero_count::ZeroCount;
use super::{
    AddedStatistics, BatchPlan, BatchWarmupHook, HookError, ORDER, OWN, RemainingHooks,
    SequenceWarmupHook, StepContext, StepDecision, StepHook, StepInput, StepReport, StepRun,
    StepUpdate,
};
use crate::metrics::SkipReason;
use crate::{TrainConfig, TrainError, TrainOutcome};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::data_parallel::{DistributedDataParallel, Gradients};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::ReportedLayer;
use burn_megatron::optim::{ParallelOptimizer, TooManySkips};

/// The hooks of a trainer.
pub(crate) struct Hooks<M>(Vec<Box<dyn StepHook<M>>>);

impl<M: LanguageModel> Hooks<M> {
    /// Builds the hooks that the settings of a run use. Collective: call on all ranks of the world.
    pub fn of_run(
        config: &TrainConfig,
        optimizer: &mut ParallelOptimizer,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, TrainError> {
        let mut hooks = Self(vec![]);
        hooks.add(AverageWeights::new(config, optimizer, ddp));
        hooks.add(AttentionLogitLimit::new(config, ddp)?);
        let routers = ReportedLayer::of_all_stages(ddp.routers(), ddp.groups())?;
        let reported = Routers::new(&routers);
        hooks.add(reported.clone().map(ExpertLoad));
        hooks.add(reported.map(RouterBias));
        let (groups, model) = (ddp.groups(), ddp.module());
        let length = config.sequence_length.unwrap_or(model.context());
        hooks.add(HybridContextHook::new(groups, model, length, &routers)?);
        hooks.add(BatchWarmupHook::new(config));
        hooks.add(SequenceWarmupHook::new(config));
        hooks.add(SkipSpikes::new(config));
        hooks.add(Replay::new(config));
        hooks.add(Fp8Scales::new(ddp));
        hooks.add(ZeroCount::new(config));
        hooks.add(ReplicaCheck::new(config));
        hooks.add(CudaGraphs::new(config));
        Ok(hooks)
    }

    /// Adds a hook at its place in the order. Does nothing for `None`.
    pub fn add(&mut self, hook: Option<impl StepHook<M>>) {
        let Some(hook) = hook else { return };
        let place = |hook: &dyn StepHook<M>| {
            let named = ORDER.iter().position(|name| *name == hook.name());
            named.or_else(|| ORDER.iter().position(|name| *name == OWN))
        };
        let own = place(&hook);
        let at = self.0.partition_point(|other| place(&**other) <= own);
        self.0.insert(at, Box::new(hook));
    }

    /// Removes a hook.
    pub fn remove(&mut self, name: &str) -> Result<Box<dyn StepHook<M>>, HookError> {
        let found = self.0.iter().position(|hook| hook.name() == name);
        match found {
            Some(at) => Ok(self.0.remove(at)),
            None => Err(HookError::Unknown {
                name: name.into(),
                names: self.names().map(String::from).collect(),
            }),
        }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|hook| hook.name())
    }

    pub fn get<H: StepHook<M>>(&self) -> Option<&H> {
        let mut hooks = self.0.iter();
        hooks.find_map(|hook| (&**hook as &dyn Any).downcast_ref())
    }

    pub fn get_mut<H: StepHook<M>>(&mut self) -> Option<&mut H> {
        let mut hooks = self.0.iter_mut();
        hooks.find_map(|hook| (&mut **hook as &mut dyn Any).downcast_mut())
    }

    pub fn check(&self, context: &StepContext<'_, M>) -> Result<(), TrainError> {
        self.0.iter().try_for_each(|hook| hook.check(context))
    }

    pub fn batches(&self, plan: &mut BatchPlan) {
        self.0.iter().for_each(|hook| hook.batches(plan));
    }

    pub fn run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
    ) -> Result<StepRun, TrainError> {
        RemainingHooks(&mut self.0).run(context, input)
    }

    pub fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
    ) -> Result<AddedStatistics, TrainError> {
        let mut added = AddedStatistics::default();
        for hook in &mut self.0 {
            hook.statistics(context, &mut added)?;
        }
        let dtype = statistics_dtype(context.ddp.device());
        for (_, tensor) in &mut added.0 {
            *tensor = tensor.clone().cast(dtype);
        }
        Ok(added)
    }

    pub fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        mut decision: StepDecision<'_>,
    ) -> Result<Option<SkipReason>, TrainError> {
        let mut hooks = &mut self.0[..];
        while let Some((hook, rest)) = hooks.split_first_mut() {
            hook.decide(context, &mut decision, RemainingHooks(rest))?;
            hooks = rest;
        }
        if context.defers && decision.skip.is_some() {
            return Err(HookError::DeferredSkip(context.step()).into());
        }
        Ok(decision.skip)
    }

    pub fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        gradients: &Gradients,
    ) -> Result<(), TrainError> {
        let mut hooks = self.0.iter_mut();
        hooks.try_for_each(|hook| hook.before_update(context, update, gradients))
    }

    pub fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        let mut hooks = self.0.iter_mut().rev();
        hooks.try_for_each(|hook| hook.after_update(context, update))
    }

    pub fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let mut hooks = self.0.iter_mut();
        hooks.try_for_each(|hook| hook.metrics(context, report))
    }

    pub fn before_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let hooks = self.0.iter_mut();
        hooks.for_each(|hook| hook.before_evaluation(context));
    }

    pub fn after_evaluation(&mut self, context: &mut StepContext<'_, M>) {
        let hooks = self.0.iter_mut().rev();
        hooks.for_each(|hook| hook.after_evaluation(context));
    }

    pub fn before_save(&mut self, context: &mut StepContext<'_, M>) -> Result<(), TrainError> {
        let mut hooks = self.0.iter_mut();
        hooks.try_for_each(|hook| hook.before_save(context))
    }

    pub fn save_state(&self, state: &mut RunState) {
        self.0.iter().for_each(|hook| hook.save_state(state));
    }

    pub fn load_state(
        &mut self,
        context: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        let mut hooks = self.0.iter_mut();
        hooks.try_for_each(|hook| hook.load_state(context, state))
    }

    pub fn outcome(&self, outcome: &mut TrainOutcome) {
        self.0.iter().for_each(|hook| hook.outcome(outcome));
    }

    pub fn explain_skips(&self, step: usize, skips: &TooManySkips) -> Option<TrainError> {
        let mut hooks = self.0.iter();
        hooks.find_map(|hook| hook.explain_skips(step, skips))
    }

    pub fn deferral_error(&self) -> Option<TrainError> {
        self.0.iter().find_map(|hook| hook.deferral_error())
    }
}
