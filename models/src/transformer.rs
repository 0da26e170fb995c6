//! A decoder-only transformer.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::collective::{self, Comm};
use burn_megatron::kernel_selection::Operation;
use burn_megatron::kernels::record;
use burn_megatron::kernels::rope::{RopeConfig, RopeTable};
use burn_megatron::kernels::soft_cap::soft_cap;
use burn_megatron::model::{CachedAttention, StageBuilder, StageLayers, StageRun, on_stage};
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::nn::hook::with_anchor;
use burn_megatron::nn::moe::{MoeForward, RoutedTokens, RouterStep};
use burn_megatron::nn::{
    ActivationLayout, BatchFormat, BuildError, Dropout, Init, KvCache, LearnedPositions,
    LearnedPositionsConfig, LinearCrossEntropy, LossFactor, LossTerm, Losses, ModelBuilder, Norm,
    OutputLayer, OutputLayerConfig, Residual, SEQUENCE_DIM, SummedLosses,
    VocabParallelCrossEntropy, VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};

use crate::cost::flops_per_token;
use crate::mtp::{self, MtpLayer, MtpRows};
use crate::{Block, LayerSpec, Mixer, Positions, StandardMixer, TransformerConfig};

/// A decoder-only transformer, such as GPT-2, Llama or Mixtral. With pipeline parallelism, it contains only the stages
/// of one pipeline rank.
///
/// With sequence parallelism, the forward splits the residual stream `[batch, seq, hidden]` over the tensor-parallel
/// ranks to `[batch, seq / tensor, hidden]`. Apart from this split, the code of the forward is the same on every rank.
///
/// `X` is the type of the mixers. Use [`with_layers`](Self::with_layers) to build a transformer with custom mixers.
#[derive(Module, Debug)]
pub struct Transformer<X: Mixer = StandardMixer> {
    /// Present on the first pipeline stage, and on the last stage with a tied output layer or MTP modules.
    embedding: Option<VocabParallelEmbedding>,
    positions: Option<LearnedPositions>,
    dropout: Dropout,
    /// The blocks of all pipeline stages of this rank.
    blocks: StageLayers<Block<X>>,
    norm: Option<Norm>,
    output: Option<OutputLayer>,
    /// The MTP modules, which are present only on the last pipeline stage.
    mtp: Vec<MtpLayer<X>>,
    #[module(skip)]
    rotary: RotaryTables,
    #[module(skip)]
    loss: LinearCrossEntropy,
    #[module(skip)]
    terms: Vec<LossTerm>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    layout: ActivationLayout,
    #[module(skip)]
    sequence_multiple: usize,
    #[module(skip)]
    config: TransformerConfig,
    /// The specifications of all layers of the complete model.
    #[module(skip)]
    layers: Arc<[LayerSpec<X::Spec>]>,
}

/// The RoPE tables of a model.
#[derive(Clone, Debug)]
struct RotaryTables {
    /// The RoPE table, or `None` with learned positions.
    all: Option<RopeTable>,
    /// The RoPE table of blocks with a sliding window, if it differs from `all`.
    windowed: Option<RopeTable>,
}

impl RotaryTables {
    fn new(
        config: &TransformerConfig,
        head_width: usize,
        builder: &ModelBuilder,
    ) -> Result<Self, BuildError> {
        Ok(Self {
            all: rotary(config.rope(head_width), builder)?,
            windowed: rotary(config.local_rope(head_width), builder)?,
        })
    }

    /// Returns the RoPE table of a block.
    fn of<X: Mixer>(&self, block: &Block<X>) -> Option<&RopeTable> {
        let windowed = self.windowed.as_ref().filter(|_| block.window().is_some());
        windowed.or(self.all.as_ref())
    }
}

/// Returns the input of expert layers that run within one autodiff node.
fn in_one_node(tokens: RoutedTokens, step: Option<&RouterStep>) -> MoeForward<'_> {
    MoeForward {
        tokens: Some(tokens),
        step,
        ..MoeForward::default()
    }
}

/// Returns the RoPE table for this configuration.
fn rotary(
    rope: Option<RopeConfig>,
    builder: &ModelBuilder,
) -> Result<Option<RopeTable>, BuildError> {
    let Some(rope) = rope else {
        return Ok(None);
    };
    let rope = RopeConfig {
        // An outline computes nothing, so it needs no table.
        max_positions: if builder.is_outline() && !record::is_recording() {
            1
        } else {
            rope.max_positions
        },
        ..rope
    };
    let table = RopeTable::new(&rope, builder.device(), builder.dtype());
    Ok(Some(
        table.map_err(|error| builder.error(error.to_string()))?,
    ))
}

/// Returns the number of blocks at the start and at the end of the complete model that are not computed in FP8.
fn blocks_at_ends(layers: usize, scope: &ModelBuilder) -> Result<usize, BuildError> {
    let ends = scope.fp8().config().first_last_bf16;
    if ends <= layers / 2 {
        Ok(ends)
    } else {
        Err(scope.child("blocks").error(format!(
            "first_last_bf16 = {ends} excludes {ends} blocks at each end from FP8, but there are only \
             {layers} in all: expected at most {}",
            layers / 2
        )))
    }
}

impl Transformer {
    /// The target index that the loss ignores.
    pub const IGNORE: i64 = -1;
}

impl<X: Mixer> Transformer<X> {
    /// Builds the pipeline stages of this rank from layer specifications. `layer` returns the specification of a layer,
    /// given the index of the layer in the complete model. For example, it can call [`TransformerConfig::layer`] and
    /// replace the mixer. `layer` is called after the sizes of the model are checked.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the sizes of the model are inconsistent or cannot be split over the layout.
    pub fn with_layers(
        config: &TransformerConfig,
        layer: impl Fn(usize) -> LayerSpec<X::Spec>,
        stages: &StageBuilder,
    ) -> Result<Self, BuildError> {
        let root = stages.root();
        let (place, init) = (root.place(), Init::Normal(config.init_std));
        let head_width = config.check(place.size, root.sequence_parallel())?;
        let layers: Arc<[_]> = (0..config.layers).map(&layer).collect();
        let hidden = config.hidden;
        let vocabulary = Vocabulary::padded(
            config.vocabulary,
            config.vocabulary_divisible_by,
            place.size,
        );
        let scale = config.scaled_embedding.then(|| (hidden as f64).sqrt());
        let comm = root.groups().tensor().clone();
        let embedding = if config.tied || config.mtp.is_some() {
            stages.first_and_last("embedding")
        } else {
            stages.first("embedding")
        };
        let embedding = embedding.map(|builder| {
            VocabParallelEmbeddingConfig::new(vocabulary, hidden)
                .with_init(init)
                .with_scale(scale)
                .init(&builder)
        });
        let learned = config.positions == Positions::Learned;
        let positions = stages.first("positions").filter(|_| learned);
        let output = stages.last("output").map(|builder| {
            OutputLayerConfig::new(vocabulary, hidden)
                .with_init(init)
                .with_tied(config.tied)
                .init(&builder)
        });
        let ends = blocks_at_ends(config.layers, root)?;
        let loss = VocabParallelCrossEntropy::new(vocabulary, &comm)
            .with_label_smoothing(config.label_smoothing)
            .with_z_loss(config.z_loss)
            .with_fused(root.is_fused(Operation::Loss))
            .with_ignore(Some(Transformer::IGNORE));
        let further = config.mtp.as_ref().map(|_| LossTerm::FurtherTokens);
        let terms = loss.terms().iter().copied().chain(further);
        let loss_chunk_size = root.kernels().loss_chunk_size();
        Ok(Self {
            terms: terms.collect(),
            embedding: embedding.transpose()?,
            positions: positions.map(|builder| {
                LearnedPositionsConfig::new(config.context, hidden)
                    .with_init(init)
                    .init(&builder)
            }),
            dropout: Dropout::new(config.dropout, &root.child("dropout"))?,
            blocks: stages.layers_in_runs("blocks", |i, builder| {
                let in_8_bits = i >= ends && i + ends < config.layers;
                let builder = if in_8_bits {
                    builder
                } else {
                    builder.without_fp8()
                };
                Block::new(&layer(i), &builder)
            })?,
            norm: stages
                .last("norm")
                .map(|builder| config.norm().init(&builder)),
            output: output.transpose()?,
            mtp: match layers.last() {
                Some(last) => MtpLayer::all(config, last, stages, ends == 0)?,
                None => vec![],
            },
            rotary: RotaryTables::new(config, head_width, root)?,
            loss: LinearCrossEntropy::new(loss, loss_chunk_size)
                .with_soft_cap(config.logit_soft_cap),
            comm,
            layout: if root.sequence_parallel() {
                ActivationLayout::SplitAlong {
                    dim: SEQUENCE_DIM,
                    place,
                }
            } else {
                ActivationLayout::Whole
            },
            sequence_multiple: root.sequence_multiple(),
            config: config.clone(),
            layers,
        })
    }

    /// Converts tokens `[batch, seq]` to embeddings, which start the residual stream.
    fn embed(&self, tokens: Tokens, format: &BatchFormat<'_>) -> Tensor<3> {
        let mut x = on_stage(&self.embedding, "the embedding").forward(tokens);
        if let Some(positions) = &self.positions {
            x = positions.forward_with_format(x, format);
        }
        self.dropout.forward(x, self.layout)
    }

    /// Runs the layers of a pipeline stage. On the last stage, it also runs the last norm and the MTP modules.
    fn run_stage(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        mut tokens: Tokens,
        mut format: BatchFormat<'_>,
    ) -> Tensor<3> {
        let (step, nodes) = (tokens.router_step.clone(), tokens.nodes.clone());
        let experts = MoeForward {
            nodes: nodes.as_ref(),
            ..in_one_node(format.routed(&tokens), step.as_ref())
        };
        let further = std::mem::take(&mut tokens.further);
        let x = input.unwrap_or_else(|| self.embed(tokens, &format));
        let runs = self.blocks.runs(stage);
        let x = runs.fold(x.into(), |x, run| {
            self.run_blocks(&run, x, &mut format, &experts)
        });
        match &self.norm {
            Some(norm) if self.blocks.is_last(stage) => {
                let hidden = norm.forward_add(x).0;
                self.with_further(hidden, further, &mut format, step.as_ref())
            }
            _ => x.sum(),
        }
    }

    /// Runs the MTP modules, and returns the output of the last norm concatenated with their outputs. Returns `hidden`
    /// unchanged if there are no further tokens.
    fn with_further(
        &self,
        hidden: Tensor<3>,
        further: Vec<Tokens>,
        format: &mut BatchFormat<'_>,
        step: Option<&RouterStep>,
    ) -> Tensor<3> {
        if further.is_empty() {
            return hidden;
        }
        assert_eq!(
            further.len(),
            self.mtp.len(),
            "further tokens of each depth"
        );
        let (mut rows, mut before) = (vec![hidden.clone()], hidden);
        for (layer, tokens) in self.mtp.iter().zip(further) {
            let routed = format.routed(&tokens);
            // The anchor adds this gradient of the embedding before the gradient of the lookups in the first stage.
            let embedded = with_anchor(&before, || {
                on_stage(&self.embedding, "the embedding").forward(tokens)
            });
            before = layer.forward(before, embedded, self.layout, |region, block, x| {
                let context = format.layer(0);
                let rotary = self.rotary.of(block);
                let owned = region.is_active().then(|| context.to_owned_context());
                let Some(owned) = owned.flatten() else {
                    // Later MTP modules also use the output of this block, so all of them run within one autodiff node.
                    return block.forward(
                        x,
                        rotary,
                        self.layout,
                        context,
                        in_one_node(routed, step),
                    );
                };
                let (block, layout, step) = (block.clone(), self.layout, step.cloned());
                let rotary = rotary.cloned();
                region.run_stream(x, move |x| {
                    let experts = in_one_node(routed.clone(), step.as_ref());
                    block.forward(x, rotary.as_ref(), layout, owned.context(), experts)
                })
            });
            rows.push(before.clone());
        }
        Tensor::cat(rows, 0)
    }

    /// Returns the number of MTP modules, and the weight of the loss of each module.
    fn further_loss(&self) -> Option<(usize, f64)> {
        let mtp = self.config.mtp.as_ref()?;
        Some((mtp.layers, mtp.weight()))
    }

    /// Runs a sequence of blocks that are recomputed together or not recomputed.
    fn run_blocks(
        &self,
        run: &StageRun<'_, Block<X>>,
        x: Residual,
        format: &mut BatchFormat<'_>,
        experts: &MoeForward<'_>,
    ) -> Residual {
        let layout = self.layout;
        // Without a KV cache, the context is the same in every block.
        let is_active = run.region.is_active();
        let context = is_active.then(|| format.layer(0).to_owned_context());
        let Some(context) = context.flatten() else {
            return run.layers().fold(x, |x, (i, block)| {
                let rotary = self.rotary.of(block);
                block.forward(x, rotary, layout, format.layer(i), experts.clone())
            });
        };
        let (blocks, rotary) = (run.to_owned_layers(), self.rotary.clone());
        let (tokens, step) = (experts.tokens.clone(), experts.step.cloned());
        run.region.run_stream(x, move |x| {
            blocks.iter().fold(x, |x, (_, block)| {
                let context = context.context();
                let experts = MoeForward {
                    tokens: tokens.clone(),
                    step: step.as_ref(),
                    ..MoeForward::default()
                };
                block.forward(x, rotary.of(block), layout, context, experts)
            })
        })
    }

    fn output(&self) -> &OutputLayer {
        on_stage(&self.output, "the output layer")
    }
}

impl<X: Mixer> LanguageModel for Transformer<X> {
    type Cache = X::Cache;

    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let format = tokens.format();
        self.run_stage(stage, input, tokens, format)
    }

    fn sequence_multiple(&self) -> usize {
        self.sequence_multiple
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let embedding = self.embedding.as_ref();
        self.loss.losses(hidden, self.output(), embedding, targets)
    }

    fn further_depths(&self) -> usize {
        self.further_loss().map_or(0, |(depths, _)| depths)
    }

    fn loss_sums_of(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
        factor: &LossFactor,
    ) -> SummedLosses {
        let sums = |hidden, targets, factor: &LossFactor| {
            let embedding = self.embedding.as_ref();
            self.loss
                .sums(hidden, self.output(), embedding, targets, factor)
        };
        let Some((depths, weight)) = self.further_loss() else {
            return sums(hidden, targets, factor);
        };
        let MtpRows { own, further } = MtpRows::split(hidden, targets, depths);
        let further = sums(further.0, further.1, &factor.times(weight)).objective;
        mtp::add_sums(sums(own.0, own.1, factor), further, weight)
    }

    fn loss_terms(&self) -> &[LossTerm] {
        &self.terms
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        let logits = self.output().forward(hidden, self.embedding.as_ref());
        let logits = match self.config.logit_soft_cap {
            Some(cap) => soft_cap(logits, cap),
            None => logits,
        };
        let logits = collective::gather(logits, 2, &self.comm);
        logits.narrow(2, 0, self.config.vocabulary)
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn output_weight(&self) -> Option<&str> {
        Some(if self.config.tied {
            "embedding.weight"
        } else {
            "output.weight"
        })
    }

    fn context(&self) -> usize {
        self.config.context
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        flops_per_token::<X>(&self.config, &self.layers, seq)
    }
}

impl<X: Mixer<Cache = KvCache>> CachedAttention for Transformer<X> {
    fn attention_windows(&self) -> Vec<Option<usize>> {
        let drafting = self.mtp.first().map(|layer| layer.block.window());
        self.blocks
            .iter()
            .map(Block::window)
            .chain(drafting)
            .collect()
    }

    fn rereads_after(&self) -> Option<usize> {
        let short = self.rotary.all.as_ref()?.short_rows()?;
        Some(short.len())
    }

    fn can_draft(&self) -> bool {
        self.config.mtp.is_some()
    }

    fn draft_cached(
        &self,
        hidden: Tensor<3>,
        next: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let next = Tokens::from(next);
        let routed = BatchFormat::Cached(cache).routed(&next);
        let embedded = on_stage(&self.embedding, "the embedding").forward(next);
        let [layer, ..] = &self.mtp[..] else {
            unreachable!("the last stage has a module of each depth")
        };
        let number = self.blocks.iter().count();
        layer.forward(hidden, embedded, self.layout, |_, block, x| {
            let mut format = BatchFormat::Cached(cache);
            let rotary = self.rotary.of(block);
            let context = format.layer(number);
            block.forward(x, rotary, self.layout, context, in_one_node(routed, None))
        })
    }

    fn hidden_cached(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        self.run_stage(stage, input, ids.into(), BatchFormat::Cached(cache))
    }
}

#[cfg(test)]
#[path = "mtp_tests.rs"]
mod mtp_tests;
