//! The parts of a block: modules whose parameter paths differ from the paths that Burn's derive macro creates.
//!
//! The paths of parameters are keys of weights and checkpoints, such as `blocks.3.attention.qkv.weight`. Burn's derive
//! macro would use the name of the field and the variant of the enum: `blocks.3.mixer.Attention.qkv.weight`.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Tensor};
use burn_megatron::nn::Bias;

/// The output of a part of a block, and an optional bias that the caller must add to the output.
pub type PartOutput = (Tensor<3>, Option<Bias>);

/// The container type that is passed to module visitors. It is the same as in the derived implementation of
/// [`Block`](crate::Block).
const CONTAINER: &str = "Struct:Block";

/// A module in the field `field` of a block. The paths of its parameters contain `name` in place of the field.
#[derive(Clone, Debug)]
pub(crate) struct Part<M> {
    pub field: &'static str,
    pub name: &'static str,
    pub module: M,
}

impl<M> Part<M> {
    fn map_module(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            module: change(self.module),
            ..self
        }
    }
}

impl<M: Module> Module for Part<M> {
    // The derived implementation of the block has already entered the field, and it leaves the field afterwards.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.exit_module(self.field, CONTAINER);
        visitor.enter_module(self.name, CONTAINER);
        self.module.visit(visitor);
        visitor.exit_module(self.name, CONTAINER);
        visitor.enter_module(self.field, CONTAINER);
    }

    fn map<A: ModuleMapper>(self, mapper: &mut A) -> Self {
        mapper.exit_module(self.field, CONTAINER);
        mapper.enter_module(self.name, CONTAINER);
        let part = self.map_module(|module| module.map(mapper));
        mapper.exit_module(part.name, CONTAINER);
        mapper.enter_module(part.field, CONTAINER);
        part
    }

    fn num_params(&self) -> usize {
        self.module.num_params()
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_module(|module| module.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_module(|module| module.fork(device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn valid(&self) -> Self {
        self.clone().map_module(|module| module.valid())
    }

    fn train(self) -> Self {
        self.map_module(Module::train)
    }

    fn materialize(self) -> Self {
        self.map_module(Module::materialize)
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Part<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Part<M> {}

/// Implements Burn's `Module` for an enum in which each variant contains one module. Burn's derive macro adds the name
/// of the variant to the paths of parameters. This macro does not: the parameters of a module have the same paths
/// inside and outside of the enum.
///
/// ```
/// use burn::nn::{LayerNorm, RmsNorm};
///
/// #[derive(Clone, Debug)]
/// enum AnyNorm {
///     Layer(LayerNorm),
///     Rms(RmsNorm),
/// }
///
/// burn_megatron_models::module_enum!(AnyNorm { Layer, Rms });
/// ```
#[macro_export]
macro_rules! module_enum {
    ($name:ident { $($variant:ident),+ $(,)? }) => {
        impl ::burn::module::Module for $name {
            fn visit<V: ::burn::module::ModuleVisitor>(&self, visitor: &mut V) {
                match self {
                    $(Self::$variant(module) => ::burn::module::Module::visit(module, visitor),)+
                }
            }

            fn map<M: ::burn::module::ModuleMapper>(self, mapper: &mut M) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::map(module, mapper))
                    })+
                }
            }

            fn num_params(&self) -> usize {
                match self {
                    $(Self::$variant(module) => ::burn::module::Module::num_params(module),)+
                }
            }

            fn to_device(self, device: &::burn::tensor::Device) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::to_device(module, device))
                    })+
                }
            }

            fn fork(self, device: &::burn::tensor::Device) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::fork(module, device))
                    })+
                }
            }

            fn collect_devices(
                &self,
                devices: ::burn::module::Devices,
            ) -> ::burn::module::Devices {
                match self {
                    $(Self::$variant(module) => {
                        ::burn::module::Module::collect_devices(module, devices)
                    })+
                }
            }

            fn valid(&self) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::valid(module))
                    })+
                }
            }

            fn train(self) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::train(module))
                    })+
                }
            }

            fn materialize(self) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(::burn::module::Module::materialize(module))
                    })+
                }
            }
        }

        impl ::burn::module::ModuleDisplayDefault for $name {
            fn content(
                &self,
                content: ::burn::module::Content,
            ) -> Option<::burn::module::Content> {
                match self {
                    $(Self::$variant(module) => {
                        ::burn::module::ModuleDisplayDefault::content(module, content)
                    })+
                }
            }
        }

        impl ::burn::module::ModuleDisplay for $name {}
    };
}
