//! Where a module is built: its ranks, its device, its seed, and its path in the model.

use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::fp8::{Fp8, Fp8Config, Fp8Error, Fp8Layer, Split};
use super::init::stream_key;
use super::{Init, ParameterEntry, ParameterTable, Place, Placement, Position, TableError};
use crate::choice::{ChoiceError, Choices, Chosen, Operation};
use crate::comm::Groups;
use crate::mesh::MeshError;

/// What a layer is built from. [`Scope::child`] goes one step down the module's path.
///
/// A layer that builds a parameter declares its placement in the same call, so that the table of
/// the model ([`Scope::finish`]) is complete by construction.
#[derive(Clone, Debug)]
pub struct Scope {
    shared: Arc<Shared>,
    groups: Groups,
    path: String,
    at_both_ends: bool,
    stage: usize,
    /// The type of activations.
    compute: DType,
    /// Whether layers may compute in 8 bits.
    allows_fp8: bool,
    /// Whether parameters get no memory.
    outlines: bool,
}

#[derive(Debug)]
struct Shared {
    device: Device,
    dtype: DType,
    seed: u64,
    position: Position,
    kernels: Mutex<Chosen>,
    fp8: Mutex<Fp8>,
    declared: Mutex<Vec<ParameterEntry>>,
}

/// A tensor of this shape with one element of memory. It is not a number: whoever reads it instead
/// of the parameter sees that.
pub(crate) fn placeholder<const D: usize>(
    shape: [usize; D],
    options: (&Device, DType),
) -> Tensor<D> {
    if shape.contains(&0) {
        return Tensor::empty(shape, options);
    }
    let one = Tensor::<1>::full([1], f64::NAN, options);
    one.reshape([1; D]).expand(shape)
}

/// A parameter to be built.
#[derive(Clone, Debug)]
pub struct ParameterSpec<const D: usize> {
    /// The shape of the whole parameter.
    pub shape: [usize; D],
    /// How the ranks of the tensor axis share it.
    pub placement: Placement,
    /// Its initial values.
    pub init: Init,
    /// See [`ParameterEntry::partial_gradient`].
    pub partial_gradient: bool,
    /// See [`ParameterEntry::decay`].
    pub decay: bool,
}

impl<const D: usize> ParameterSpec<D> {
    /// A replicated parameter, decayed by the optimizer if it has two or more dimensions.
    pub fn new(shape: [usize; D], init: Init) -> Self {
        let placement = Placement::Replicated;
        Self {
            shape,
            placement,
            init,
            partial_gradient: false,
            decay: D > 1,
        }
    }

    /// Sets the placement.
    pub fn placed(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Says whether the gradients of the tensor axis are parts of a sum.
    pub fn with_partial_gradient(mut self, partial: bool) -> Self {
        self.partial_gradient = partial;
        self
    }
}

/// A layer that cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BuildError {
    /// A size does not fit the mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A layer's own sizes do not fit each other.
    #[error("{path}: {message}")]
    Config {
        /// The layer.
        path: String,
        /// What is wrong, and what would fit.
        message: String,
    },
    /// A kernel that was asked for cannot run.
    #[error(transparent)]
    Kernels(#[from] ChoiceError),
    /// 8-bit layers that cannot be.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// What the layers declared does not fit the module.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// A module with the table of its parameters and the position of its random streams.
#[derive(Clone, Debug)]
pub struct ParallelModule<M> {
    /// The module, with this rank's part of each parameter.
    pub module: M,
    /// How each parameter lies.
    pub table: ParameterTable,
    /// The step and sample that dropout draws for.
    pub position: Position,
    /// Which operations are fused.
    pub kernels: Chosen,
    /// The layers that multiply in 8 bits.
    pub fp8: Fp8,
}

impl<M: Module> ParallelModule<M> {
    /// A module that is the same on every rank, such as one of burn-nn's.
    pub fn replicated(module: M) -> Self {
        let table = ParameterTable::replicated(&module);
        let device = module.devices().into_iter().next();
        let kernels = automatic(&device.unwrap_or_else(Device::flex), DType::F32);
        Self {
            kernels,
            module,
            table,
            position: Position::default(),
            fp8: Fp8::default(),
        }
    }

    /// The same, with the layers in it that multiply in 8 bits: for a module with
    /// [`Fp8Linear`](super::fp8::Fp8Linear)s, whose paths must be those of the module. Models that were
    /// built from a [`Scope`] have theirs.
    pub fn with_fp8(mut self, fp8: &Fp8) -> Self {
        self.fp8 = fp8.clone();
        self
    }
}

/// What is chosen where nobody says anything.
fn automatic(device: &Device, dtype: DType) -> Chosen {
    match Chosen::new(&Choices::default(), device, dtype) {
        Ok(chosen) => chosen,
        Err(error) => unreachable!("an automatic choice fits every device: {error}"),
    }
}

impl Scope {
    /// The root of a model, in f32 and with seed 0.
    pub fn new(groups: &Groups, device: &Device) -> Self {
        Self::with(groups, device, 0, DType::F32)
    }

    /// The root of a model with a seed and the type of its parameters.
    pub fn with(groups: &Groups, device: &Device, seed: u64, dtype: DType) -> Self {
        let shared = Shared {
            device: device.clone(),
            dtype,
            seed,
            position: Position::default(),
            kernels: Mutex::new(automatic(device, dtype)),
            fp8: Mutex::default(),
            declared: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            groups: groups.clone(),
            path: String::new(),
            at_both_ends: false,
            stage: 0,
            compute: dtype,
            allows_fp8: true,
            outlines: false,
        }
    }

    /// Chooses which operations of the model are fused; to be called on the root.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] where a kernel was asked for that the device does not have.
    pub fn with_kernels(self, choices: &Choices) -> Result<Self, BuildError> {
        let chosen = Chosen::new(choices, self.device(), self.compute)?;
        *self.lock_kernels() = chosen;
        Ok(self)
    }

    /// Chooses operations for a model that computes in `dtype` whatever the type of its parameters;
    /// to be called on the root, before [`with_kernels`](Self::with_kernels).
    pub fn computing_in(mut self, dtype: DType) -> Self {
        self.compute = dtype;
        *self.lock_kernels() = automatic(self.device(), dtype);
        self
    }

    /// The same place, for a model that is built to see what it will hold: its parameters have their
    /// shapes and no values, and next to no memory. To be called on the root.
    pub fn outline(self) -> Self {
        Self {
            outlines: true,
            ..self
        }
    }

    /// Whether what is built is an [`outline`](Self::outline), which holds no values.
    pub fn is_outline(&self) -> bool {
        self.outlines
    }

    /// Whether the layer that is being built uses the fused form of an operation.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.lock_kernels().is_fused(operation)
    }

    /// Says why the layer that is being built cannot use the fused form of an operation.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] where the kernel was asked for.
    pub fn keep_unfused(
        &self,
        operation: Operation,
        reason: impl Into<String>,
    ) -> Result<(), BuildError> {
        Ok(self.lock_kernels().keep_unfused(operation, reason)?)
    }

    /// Says why the layer that is being built is faster with the unfused form of an operation.
    pub fn prefer_unfused(&self, operation: Operation, reason: impl Into<String>) {
        self.lock_kernels().prefer_unfused(operation, reason);
    }

    /// Lets the linear layers of the model multiply in 8 bits; to be called on the root.
    ///
    /// # Errors
    ///
    /// [`BuildError::Fp8`] for settings without a meaning. Whether each pattern fits a layer is found
    /// out later: [`Fp8::check_layers`].
    pub fn with_fp8(self, config: &Fp8Config) -> Result<Self, BuildError> {
        *self.lock_fp8() = Fp8::new(config)?;
        Ok(self)
    }

    /// The same place, for layers that compute in the type of the model whatever their recipe.
    pub fn without_fp8(&self) -> Self {
        Self {
            allows_fp8: false,
            ..self.clone()
        }
    }

    /// The layers of the model that multiply in 8 bits, as far as they are built.
    pub fn fp8(&self) -> Fp8 {
        self.lock_fp8().clone()
    }

    /// The 8-bit arithmetic of the linear layer that is being built, if it has one. `split` says of which
    /// tensors the ranks hold parts.
    pub(super) fn fp8_layer(&self, split: Split) -> Result<Option<Fp8Layer>, BuildError> {
        let comm = self.groups.tensor();
        Ok(self.fp8().layer(&self.path, comm, split, self.allows_fp8)?)
    }

    fn lock_fp8(&self) -> MutexGuard<'_, Fp8> {
        let fp8 = &self.shared.fp8;
        fp8.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_kernels(&self) -> MutexGuard<'_, Chosen> {
        let kernels = &self.shared.kernels;
        kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The scope of the field `name`, or of the element of a list.
    pub fn child(&self, name: impl Display) -> Self {
        Self {
            path: self.join(name),
            ..self.clone()
        }
    }

    /// The same place in the model, built for other ranks.
    pub fn with_groups(&self, groups: Groups) -> Self {
        Self {
            groups,
            ..self.clone()
        }
    }

    /// The same place, for parameters of which it is said whether the first and the last rank of
    /// the pipeline both hold them.
    pub fn at_both_ends_if(&self, at_both_ends: bool) -> Self {
        Self {
            at_both_ends,
            ..self.clone()
        }
    }

    /// The same place, for parameters that belong to a stage of the pipeline.
    pub fn in_stage(&self, stage: usize) -> Self {
        Self {
            stage,
            ..self.clone()
        }
    }

    /// The ranks.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The type of the parameters.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// This rank's place on the tensor axis.
    pub fn place(&self) -> Place {
        self.groups.place()
    }

    /// The path of the module that is being built.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The step and sample that dropout draws for.
    pub fn position(&self) -> &Position {
        &self.shared.position
    }

    /// The key of this module's random stream.
    pub fn stream_key(&self) -> u64 {
        stream_key(self.shared.seed, &self.path)
    }

    /// An error of the module that is being built.
    pub fn error(&self, message: impl Into<String>) -> BuildError {
        BuildError::Config {
            path: self.path.clone(),
            message: message.into(),
        }
    }

    /// Builds and declares the parameter in field `name`.
    pub fn parameter<const D: usize>(
        &self,
        name: &str,
        spec: ParameterSpec<D>,
    ) -> Param<Tensor<D>> {
        let ParameterSpec {
            shape,
            placement,
            init,
            partial_gradient,
            decay,
        } = spec;
        let entry = ParameterEntry {
            path: self.join(name),
            shape: shape.to_vec(),
            placement,
            partial_gradient,
            decay,
            at_both_ends: self.at_both_ends,
            stage: self.stage,
        };
        let (place, key) = (self.place(), stream_key(self.shared.seed, &entry.path));
        let options = (&self.shared.device, self.shared.dtype);
        let local = entry.local_shape(place);
        let value = match <[usize; D]>::try_from(local.as_slice()) {
            Ok(shape) if self.outlines => placeholder(shape, options),
            _ => Tensor::from_data(
                TensorData::new(init.values(&entry, place, key), local),
                options,
            ),
        };
        self.shared
            .declared
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(entry);
        Param::from_tensor(value)
    }

    /// Closes the model: its table is complete and fits the module.
    ///
    /// # Errors
    ///
    /// [`TableError`] when a parameter was built without a scope, or under another path than the
    /// one it has in the module.
    pub fn finish<M: Module>(self, module: M) -> Result<ParallelModule<M>, BuildError> {
        self.finish_part(module, |path| path)
    }

    /// Closes the part of a model that lies on this rank. `rename` turns a path in `module` into
    /// the one that the parameter has in the whole model, under which it was built.
    ///
    /// # Errors
    ///
    /// See [`finish`](Self::finish).
    pub fn finish_part<M: Module>(
        self,
        module: M,
        rename: impl Fn(String) -> String,
    ) -> Result<ParallelModule<M>, BuildError> {
        let declared = self.shared.declared.lock();
        let declared = declared.unwrap_or_else(PoisonError::into_inner).clone();
        let table = ParameterTable::of_part(&module, declared, self.place(), rename)?;
        Ok(ParallelModule {
            module,
            table,
            position: self.shared.position.clone(),
            kernels: self.lock_kernels().clone(),
            fp8: self.fp8(),
        })
    }

    fn join(&self, name: impl Display) -> String {
        match self.path.is_empty() {
            true => name.to_string(),
            false => format!("{}.{name}", self.path),
        }
    }
}
