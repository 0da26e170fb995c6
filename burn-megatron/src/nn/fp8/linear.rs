//! FP8 linear layers for any Burn module, without a device mesh.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::{Fp8, Fp8Config, Fp8Error, Fp8Layer, Fp8Recipe, SplitOperands, WeightOwner};
use crate::comm::ParallelContext;
use crate::nn::hook::fused_parameter;
use crate::nn::input_layout::InputLayout;
use crate::nn::linear::{LinearOperands, linear};

/// Configuration of an [`Fp8Linear`].
#[derive(Config, Debug)]
pub struct Fp8LinearConfig {
    /// The number of input features.
    pub input: usize,
    /// The number of output features.
    pub output: usize,
    /// Whether the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
}

impl Fp8LinearConfig {
    /// Builds the layer with the initializers of burn-nn's `Linear`. `path` is the path of the layer in the model. The
    /// patterns in the settings are matched against this path, and reports contain it.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Duplicate`] if `fp8` already has a layer with this path.
    pub fn init(&self, path: &str, fp8: &Fp8, device: &Device) -> Result<Fp8Linear, Fp8Error> {
        Fp8Linear::from_linear(self.linear(device), path, fp8)
    }

    /// Builds an MXFP8 layer that is not registered with an [`Fp8`]. Each scale is computed from the 32 values that
    /// share the scale. The layer therefore has no FP8 state, and does not need a call at the end of a step. Settings
    /// do not apply to the layer, and reports do not include it. Use [`init`](Self::init) to register the layer.
    pub fn init_mxfp8(&self, device: &Device) -> Fp8Linear {
        let config = Fp8Config {
            recipe: Some(Fp8Recipe::MxFp8),
            ..Fp8Config::default()
        };
        let built = Fp8::new(&config).and_then(|fp8| self.init("linear", &fp8, device));
        match built {
            Ok(layer) => layer,
            Err(error) => unreachable!("a recipe without settings is valid: {error}"),
        }
    }

    fn linear(&self, device: &Device) -> Linear {
        LinearConfig::new(self.input, self.output)
            .with_bias(self.bias)
            .init(device)
    }
}

/// A linear layer `y = x W + b` in FP8. It is a drop-in replacement for burn-nn's `Linear`, and its record has the same
/// keys.
///
/// With delayed scaling the record of the layer also contains its FP8 state, with the key `fp8`. Call
/// [`Fp8::end_step_single_rank`] once per step, after the backward pass. A `Trainer` makes this call automatically. For
/// data parallelism, pass the layers to the wrapper with
/// [`ParallelModule::with_fp8`](crate::nn::ParallelModule::with_fp8).
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::fp8::{Fp8, Fp8Config, Fp8Linear, Fp8LinearConfig};
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     up: Fp8Linear,
///     down: Fp8Linear,
/// }
///
/// let device = Device::flex().autodiff();
/// let config = Fp8Config {
///     recipe: Some("current".parse()?),
///     ..Fp8Config::default()
/// };
/// let fp8 = Fp8::new(&config)?;
/// let mlp = Mlp {
///     up: Fp8LinearConfig::new(16, 64).init("up", &fp8, &device)?,
///     down: Fp8LinearConfig::new(64, 16).init("down", &fp8, &device)?,
/// };
/// let x = Tensor::<2>::ones([4, 16], &device);
/// let loss = mlp.down.forward(mlp.up.forward(x)).sum();
/// let gradients = loss.backward();
/// assert!(mlp.up.weight.val().grad(&gradients).is_some());
/// fp8.end_step_single_rank()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
pub struct Fp8Linear {
    /// The weight: `[in, out]`.
    pub weight: Param<Tensor<2>>,
    /// The bias: `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// `None` if the layer does not use FP8.
    fp8: Option<Fp8Layer>,
}

impl Fp8Linear {
    /// Converts burn-nn's `Linear` to an FP8 layer with the recipe that `fp8` has for `path`. Without a recipe, the
    /// layer does not use FP8 and computes in the dtype of its input.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Duplicate`] if `fp8` already has a layer with this path.
    pub fn from_linear(linear: Linear, path: &str, fp8: &Fp8) -> Result<Self, Fp8Error> {
        let (groups, device) = (ParallelContext::single(), linear.weight.lazy_device());
        let owner = (SplitOperands::default(), WeightOwner::Layer);
        Ok(Self {
            weight: linear.weight,
            bias: linear.bias,
            fp8: fp8.layer(path, &device, groups.tensor(), owner)?,
        })
    }

    /// Returns the FP8 state of the layer, or `None` if the layer does not use FP8.
    pub fn fp8(&self) -> Option<&Fp8Layer> {
        self.fp8.as_ref()
    }

    /// Applies the layer to `[.., in]`. Returns `[.., out]` in the dtype of the input.
    ///
    /// # Panics
    ///
    /// If the size of the last dimension is not `in`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [input, output] = self.weight.lazy_shape().dims();
        let mut shape = x.dims();
        assert!(
            shape[D - 1] == input,
            "invalid input {shape:?} of a linear layer from {input} to {output} features: expected [.., {input}]"
        );
        let rows = shape[..D - 1].iter().product();
        shape[D - 1] = output;
        if rows == 0 {
            // Burn's reshape reads a 0 as "keep this dimension".
            return Tensor::zeros(shape, (&x.device(), x.dtype()));
        }
        let x = x.reshape([1, rows, input]);
        let bias = self.bias.as_ref().map(|bias| fused_parameter(bias, &x));
        let operands = LinearOperands {
            bias,
            fp8: self.fp8.as_ref(),
            ..LinearOperands::new(&self.weight, InputLayout::Local, false)
        };
        linear(x, operands).reshape(shape)
    }
}
