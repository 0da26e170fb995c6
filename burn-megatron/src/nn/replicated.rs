//! Burn modules from other crates as parts of a model. They are replicated on every rank of their stage, with the same
//! initial values in every layout.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::record;
use parking_lot::Mutex;

use super::init::stream_key;
use super::model_builder::placeholder;
use super::{ModelBuilder, ParameterEntry};

/// Guards Burn's random generators, which are global to the process. Ranks may be threads of one process.
static GENERATOR: Mutex<()> = Mutex::new(());

impl ModelBuilder {
    /// Builds a module from another crate, such as burn-nn, and declares its parameters. The parameters are replicated
    /// on every rank of the pipeline stage. Weight decay applies to parameters with two or more dimensions.
    ///
    /// The initial values come from the initializers of the module. Burn's random generator is seeded for each
    /// parameter with the seed of the model and the path of the parameter. The values therefore do not depend on the
    /// layout or the rank. The forward pass of the module must not draw random numbers. Use the
    /// [`Dropout`](super::Dropout) of this crate instead of burn-nn's dropout. Running states, such as the mean of a
    /// batch norm, are averaged over the data axis when they are saved.
    ///
    /// ```
    /// # use burn::nn::LayerNormConfig;
    /// # use burn::tensor::Device;
    /// # use burn_megatron::comm::ParallelContext;
    /// # use burn_megatron::nn::ModelBuilder;
    /// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    /// let norm = builder.child("norm").replicated(|device| LayerNormConfig::new(8).init(device));
    /// # assert_eq!(norm.gamma.val().dims(), [8]);
    /// ```
    pub fn replicated<M: Module>(&self, init: impl FnOnce(&Device) -> M) -> M {
        let _guard = GENERATOR.lock();
        // A recording draws no values.
        if !record::is_recording() {
            // Seeds parameters that are drawn immediately. Most are drawn when their value is first read.
            self.device().seed(self.stream_key());
        }
        let module = init(self.device());
        module.map(&mut Declare {
            builder: self,
            path: vec![],
        })
    }
}

/// Initializes and declares each parameter.
struct Declare<'a> {
    builder: &'a ModelBuilder,
    /// The path below the path of the builder.
    path: Vec<String>,
}

impl ModuleMapper for Declare<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let builder = self.builder;
        let path = builder.join(self.path.join("."));
        let options = (builder.device(), builder.dtype());
        let shape = param.lazy_shape();
        let value = if builder.is_outline() {
            placeholder(shape.dims(), options)
        } else {
            builder.device().seed(stream_key(builder.seed(), &path));
            // The values are read immediately. A lazy device would draw them later, with another seed.
            Tensor::from_data(param.val().into_data(), options)
        };
        builder.declare(ParameterEntry {
            stage: builder.stage,
            pipeline_copies: builder.pipeline_copies.clone(),
            frozen: builder.freezes(),
            ..ParameterEntry::replicated(path, shape.to_vec())
        });
        builder.param(value)
    }
}
