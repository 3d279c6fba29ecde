/* Stubs of the functions that TensorRT's Python bindings need from libraries that need a GPU. They suffice to import
 * the bindings. This file is compiled three times, once for each library. The library of -DINFER is linked to the lean
 * runtime, which has the plugin registry. */
#include <stddef.h>

#if defined(INFER)
void* getPluginRegistry(void);
void* createInferBuilder_INTERNAL(void* logger, int version) { return NULL; }
void* getBuilderPluginRegistry(int capability) { return getPluginRegistry(); }
#elif defined(PLUGIN)
int initLibNvInferPlugins(void* logger, const char* space) { return 0; }
#elif defined(PARSER)
void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return NULL; }
void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return NULL; }
int getNvOnnxParserVersion(void) { return 0; }
#endif
