//! Records the pipeline stages of one rank of a model.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::gradient::{ComputeGradients, FlatGradients, Place};
use burn_megatron_kernels::record::{self, RecordError, ShapeSettings};

use super::repeat::Repeat;
use super::{StageNote, StateNote, stages};
use crate::profile::StageProfile;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelError, freeze};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ContextSplitError;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens, check_context};
use burn_megatron::nn::context::SequenceShard;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::hook::{
    GradientSink, ParameterHook, WeightGradientFn, attach_each, with_anchor,
};
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::nn::{
    BuildError, LossFactor, ModelBuilder, ParallelModule, RecomputeConfig, RecomputeLayers,
};

/// The settings of [`profile_rank`]: the rank, the dtypes and the options of the model.
#[derive(Clone, Debug)]
pub struct ProfileRequest<'a> {
    /// The process groups of the rank to profile. They may be [offline](ParallelContext::offline), because no data is
    /// sent.
    pub groups: &'a ParallelContext,
    /// The dtype in which the model computes.
    pub dtype: DType,
    /// The operations that use fused kernels.
    pub kernels: &'a KernelChoices,
    /// The layers that compute in FP8.
    pub fp8: &'a Fp8Config,
    /// The layers whose activations are recomputed in the backward.
    pub recompute: &'a RecomputeConfig,
    /// The settings of LoRA adapters. If they are set, all other parameters are frozen.
    pub lora: Option<&'a LoraConfig>,
    /// Patterns that match the paths of frozen parameters.
    pub freeze: &'a [String],
    /// The shape `[batch, seq]` of a micro-batch: the number of samples, and the number of tokens before the sequence
    /// is split.
    pub shape: [usize; 2],
    /// The shape `[batch, seq, hidden]` of the tensor that the first stage on this rank receives, which is
    /// [`RankProfile::output`] of the previous stage. The first stage of the model receives no tensor and ignores this
    /// shape.
    pub input: [usize; 3],
    /// Settings of the shape-only run for properties that depend on data, such as the load imbalance of the experts.
    pub settings: ShapeSettings,
}

/// The profiles of the pipeline stages of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankProfile {
    /// The profile of each stage of the rank, with the index of the stage in the model.
    pub stages: Vec<(usize, StageProfile)>,
    /// The shape `[batch, seq, hidden]` of the tensor that a stage sends to the next stage. The last stage of the model
    /// sends nothing.
    pub output: [usize; 3],
}

/// An error of [`profile_rank`].
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The model cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The sequences cannot be split over the context axis.
    #[error(transparent)]
    Context(#[from] ContextSplitError),
    /// The model has an operation that cannot run without data.
    #[error("the memory of the model cannot be planned: {0}")]
    Record(#[from] RecordError),
    /// A pattern of [`ProfileRequest::freeze`] is invalid.
    #[error(transparent)]
    Freeze(#[from] DataParallelError),
}

/// Profiles the pipeline stages of one rank of a model. The forward and the backward run with tensor shapes but without
/// data, so nothing is allocated. If layers of the same [kind](ModelConfig::layer_kind) repeat, only a few of them are
/// run.
///
/// # Errors
///
/// [`ProfileError`] if the model cannot be built or profiled. If an operation cannot run without data, the error names
/// the operation.
pub fn profile_rank<C: ModelConfig>(
    config: &C,
    request: &ProfileRequest<'_>,
) -> Result<RankProfile, ProfileError> {
    let own = burn_megatron::pipeline::stages_on_rank(
        request.groups.config(),
        request.groups.pipeline().rank(),
        config.layers(),
    );
    let own = own.map_err(|error| BuildError::Config {
        path: String::new(),
        message: error.to_string(),
    })?;
    check_context(config, request.groups.config())?;
    let (own, repeats): (Vec<_>, Vec<_>) = own
        .into_iter()
        .map(|(number, stage)| {
            let (stage, repeat) = shortened(config, request, stage);
            ((number, stage), repeat)
        })
        .unzip();
    let (output, recording) = record::record(request.settings, |device| {
        let builder = ModelBuilder::with(request.groups, device, 0, request.dtype);
        let builder = builder
            .with_kernels(request.kernels)?
            .with_fp8(request.fp8)?
            .with_recompute(request.recompute)?
            .with_lora(request.lora)?;
        let mut model = config.init_stages(builder.outline(), &own)?;
        // A pattern may match parameters of other stages, or parameters of layers that are left out.
        freeze(&mut model.table, request.freeze)?;
        record::begin_variables();
        let mut input = request.input;
        for (number, layout) in &own {
            let run = StageRun {
                device,
                request,
                number: *number,
                is_first: layout.embedding,
                is_last: layout.loss,
            };
            let output = run.record(&model, input)?;
            // The last stage may have more rows, for example for multi-token prediction. It sends them to no other
            // stage.
            if !layout.loss {
                input = output;
            }
        }
        Ok::<_, ProfileError>(input)
    })?;
    let output = output?;
    let profiles = stages(&recording, request.groups.mesh(), &repeats);
    let numbers = own.into_iter().map(|(number, _)| number);
    Ok(RankProfile {
        stages: numbers.zip(profiles).collect(),
        output,
    })
}

/// Returns a stage without its repeated layers, unless a setting depends on the position of a layer.
fn shortened<C: ModelConfig>(
    config: &C,
    request: &ProfileRequest<'_>,
    stage: StageLayout,
) -> (StageLayout, Repeat) {
    let by_place = goes_by_place(request.recompute, request.fp8, request.freeze);
    if by_place || request.recompute.layers_per_run() != Some(1) {
        return (stage, Repeat::default());
    }
    let kinds = stage.layers.clone().map(|number| config.layer_kind(number));
    let repeat = Repeat::of(&kinds.collect::<Vec<_>>());
    let layers = stage.layers.start..stage.layers.end - repeat.left_out();
    (StageLayout { layers, ..stage }, repeat)
}

/// Returns whether the number of bytes that a layer keeps depends on its position, in addition to its
/// [kind](ModelConfig::layer_kind).
pub(crate) fn goes_by_place(
    recompute: &RecomputeConfig,
    fp8: &Fp8Config,
    freeze: &[String],
) -> bool {
    let each = matches!(recompute.layers, None | Some(RecomputeLayers::Each(_)));
    let fp8_of_all = fp8.layers.is_empty() && (fp8.recipe.is_none() || fp8.first_last_bf16 == 0);
    !each || !fp8_of_all || !recompute.patterns.is_empty() || !freeze.is_empty()
}

/// The settings for recording one pipeline stage.
struct StageRun<'a> {
    device: &'a Device,
    request: &'a ProfileRequest<'a>,
    number: usize,
    is_first: bool,
    is_last: bool,
}

impl StageRun<'_> {
    /// Records the forward and the backward. Returns the shape of the output.
    fn record<M: LanguageModel>(
        &self,
        model: &ParallelModule<M>,
        input: [usize; 3],
    ) -> Result<[usize; 3], ProfileError> {
        let sink = Arc::new(ShapeSink::new(model, self.request, self.device));
        let mut entries = model.table.entries().iter().enumerate();
        let module = attach_each(model.module.clone(), || match entries.next() {
            Some((index, entry)) if entry.frozen => ParameterHook::frozen(index, sink.clone()),
            Some((index, _)) => ParameterHook::new(index, sink.clone()),
            None => unreachable!("the table has all parameters of the module"),
        });
        let (mut tokens, [rows, seq]) = self.tokens()?;
        let depths = module.further_depths();
        if self.is_last {
            let ids = vec![0; rows * seq];
            let further = (0..depths).map(|_| Tokens::new(&ids, [rows, seq], self.device));
            tokens.further = further.collect();
        }
        let shape = [rows * (1 + depths), seq];
        record::note(StateNote);
        let anchor = Tensor::<1>::empty([1], self.device);
        let first = record::calls();
        record::note(StageNote::Forward);
        let input = (!self.is_first).then(|| {
            record::note(StageNote::Input);
            Tensor::<3>::empty(input, (self.device, self.request.dtype))
        });
        let output = with_anchor(&anchor, || {
            let hidden = module.hidden(self.number, input, tokens);
            let dims = hidden.dims();
            if self.is_last {
                record::note(StageNote::Output);
                record::note(StateNote);
                let targets = Tensor::empty(shape, self.device);
                let _losses = module.loss_sums_of(hidden, targets, &LossFactor::Number(1.0));
            }
            dims
        });
        record::note(StageNote::Backward);
        record::backward_since(first);
        record::note(StageNote::End);
        Ok(output)
    }

    /// Returns the tokens of this rank and their shape.
    fn tokens(&self) -> Result<(Tokens, [usize; 2]), ContextSplitError> {
        let [rows, seq] = self.request.shape;
        let context = self.request.groups.context();
        let shard = (context.size() > 1).then(|| {
            let split = self.request.groups.config().context_split;
            SequenceShard::new([rows, seq], None, split, (context.rank(), context.size()))
        });
        let shard = shard.transpose()?;
        let shape = shard
            .as_ref()
            .map_or([rows, seq], |shard| shard.local_shape());
        let count: usize = shape.iter().product();
        let ids = vec![0; count];
        let mut tokens = Tokens::new(&ids, shape, self.device);
        tokens.shard = shard;
        tokens.router_step = Some(RouterStep::new(LossFactor::Number(1.0)).of_micro_batch(count));
        Ok((tokens, shape))
    }
}

/// Adds gradients to the gradient buffers of the training state, like
/// [`DistributedDataParallel`](burn_megatron::data_parallel::DistributedDataParallel).
struct ShapeSink {
    device: Device,
    dtype: DType,
    /// The number of elements of each parameter.
    lengths: Vec<usize>,
}

impl ShapeSink {
    fn new<M>(model: &ParallelModule<M>, request: &ProfileRequest<'_>, device: &Device) -> Self {
        let entries = model.table.entries().iter();
        let length = |shape: Vec<usize>| shape.into_iter().product();
        let lengths = entries.map(|it| length(it.local_shape(request.groups.mesh_rank())));
        Self {
            device: device.clone(),
            dtype: match request.dtype {
                DType::F64 => DType::F64,
                _ => DType::F32,
            },
            lengths: lengths.collect(),
        }
    }

    /// Returns a flat buffer for the gradients of these parameters.
    fn buffer(&self, parameters: &[usize]) -> FlatGradients {
        let mut length = 0;
        let places = parameters.iter().map(|index| {
            let offset = length;
            length += self.lengths[*index];
            Place { offset, add: true }
        });
        let places = places.collect();
        record::note(StateNote);
        FlatGradients {
            flat: Tensor::empty([length], (&self.device, self.dtype)),
            places,
        }
    }
}

impl GradientSink for ShapeSink {
    fn expect(&self, _index: usize) {}

    fn accumulate(&self, _index: usize, gradient: Tensor<1>) {
        drop(gradient);
    }

    fn accumulate_into(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        drop(compute(Some(self.buffer(parameters))));
    }

    fn accumulate_later(&self, index: usize, gradient: WeightGradientFn) {
        drop(gradient(Some(self.buffer(&[index]))));
    }
}
