//! The declaration of counters.

/// Declares a struct of counters of one object, such as a vCPU.
///
/// Each field is a `u64`, after the word `counter` or `gauge`; its documentation is the metric's
/// help text. Fields in a block `also` have a type with its own `fill` and `merge`.
#[macro_export]
macro_rules! counters {
    (
        $(#[$meta:meta])*
        pub struct $name:ident as $prefix:literal {
            $( $(#[doc = $doc:literal])+ $kind:ident $field:ident, )*
            $( also { $( $(#[$also_meta:meta])* $also:ident: $also_type:ty, )* } )?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: u64, )*
            $( $( $(#[$also_meta])* pub $also: $also_type, )* )?
        }

        impl $name {
            /// Puts the counters into `to` with `labels`.
            pub fn fill(&self, to: &mut $crate::Metrics, labels: &[(&'static str, &str)]) {
                $( to.add(
                    $crate::counters!(@metric $kind $prefix $field ($($doc)+)),
                    labels,
                    $crate::Value::Whole(self.$field),
                ); )*
                $( $( self.$also.fill(to, labels); )* )?
            }

            /// Adds the counters of another object.
            pub fn merge(&mut self, other: &Self) {
                $( self.$field += other.$field; )*
                $( $( self.$also.merge(&other.$also); )* )?
            }
        }
    };
    (@metric counter $prefix:literal $field:ident ($($doc:literal)+)) => {
        (
            concat!($prefix, "_", stringify!($field), "_total"),
            concat!($($doc),+),
            $crate::Kind::Counter,
        )
    };
    (@metric gauge $prefix:literal $field:ident ($($doc:literal)+)) => {
        (
            concat!($prefix, "_", stringify!($field)),
            concat!($($doc),+),
            $crate::Kind::Gauge,
        )
    };
}
