//! Linear layers in 8 bits for any Burn module, without a mesh.

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
    /// Input features.
    pub input: usize,
    /// Output features.
    pub output: usize,
    /// Whether the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
}

impl Fp8LinearConfig {
    /// Builds the layer with burn-nn's initial values. `path` is its path in the model, which settings and
    /// reports use.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Duplicate`] if `fp8` already has a layer with this path.
    pub fn init(&self, path: &str, fp8: &Fp8, device: &Device) -> Result<Fp8Linear, Fp8Error> {
        Fp8Linear::from_linear(self.linear(device), path, fp8)
    }

    /// Builds the layer in MXFP8. Each scale is computed from the 32 values that share it, so the layer has no state, and
    /// nothing has to be called at the end of a step. Settings and reports do not include it: for those build it with
    /// [`init`](Self::init).
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

/// `y = x W + b` in 8 bits: burn-nn's `Linear` in another arithmetic, with the same record keys.
///
/// With delayed scaling the state of the layer is a part of its record, as `fp8`, and
/// [`Fp8::end_step_single_rank`] must be called once per step, after the backward; a
/// `Trainer` calls it itself. For data parallelism pass the layers to the
/// wrapper: [`ParallelModule::with_fp8`](crate::nn::ParallelModule::with_fp8).
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
    /// `[in, out]`
    pub weight: Param<Tensor<2>>,
    /// `[out]`
    pub bias: Option<Param<Tensor<1>>>,
    /// None if the layer computes in the type of its input.
    fp8: Option<Fp8Layer>,
}

impl Fp8Linear {
    /// The same layer in the arithmetic of its recipe, or in that of its input if it has none.
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

    /// Its 8-bit arithmetic, if it has one.
    pub fn fp8(&self) -> Option<&Fp8Layer> {
        self.fp8.as_ref()
    }

    /// `[.., in]` to `[.., out]`, in the type of the input.
    ///
    /// # Panics
    ///
    /// If the last dimension is not `in`.
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
