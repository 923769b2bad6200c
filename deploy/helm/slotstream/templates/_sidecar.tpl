{{/*
The sidecar, for a chart of your own that has this one as a dependency, with mode: sidecar and workload: false. Call each with
the subchart's context, for example {{ include "slotstream.sidecar.initContainer" .Subcharts.slotstream }}:

slotstream.sidecar.initContainer    an item of the pod's initContainers; engines start once it is ready
slotstream.sidecar.volumes          items of the pod's volumes
slotstream.sidecar.engineMounts     items of the engine's volumeMounts
slotstream.sidecar.transferConfig   the value of vLLM's --kv-transfer-config, as JSON
slotstream.sidecar.graceSeconds     the pod's terminationGracePeriodSeconds
slotstream.sidecar.shutdownSeconds  vLLM's --shutdown-timeout
slotstream.podLabels, slotstream.podSecurityContext; with sidecar.sharedMemory the pod also needs shareProcessNamespace: true
*/}}
{{- define "slotstream.sidecar.initContainer" -}}
{{ include "slotstream.server" . }}
# A native sidecar: it starts before the engine, is restarted alone, and gets SIGTERM once the engine is gone.
restartPolicy: Always
{{- end -}}

{{- define "slotstream.sidecar.volumes" -}}
{{ include "slotstream.volumes" . }}
- name: engine-token
  secret:
    secretName: {{ .Values.engine.tokenSecretName }}
    defaultMode: 0400
{{- end -}}

{{- define "slotstream.sidecar.engineMounts" -}}
- {name: socket, mountPath: /run/slotstream}
- {name: engine-token, mountPath: /slotstream/token, readOnly: true}
{{- end -}}

{{- define "slotstream.sidecar.transferConfig" -}}
{{- $ours := dict "server" "unix:/run/slotstream/server.sock" "transport" (ternary "auto" "grpc" (not (empty (include "slotstream.sharedMemory" .)))) "token_file" "/slotstream/token/token" -}}
{{- dict "kv_connector" "SlotStreamConnector" "kv_connector_module_path" "slotstream.connector" "kv_role" "kv_producer"
    "kv_connector_extra_config" (merge $ours .Values.engine.connector) | toJson -}}
{{- end -}}

{{/* How long vLLM ends its requests after SIGTERM: its own time, less preStop and a quarter of a minute to stop. */}}
{{- define "slotstream.sidecar.shutdownSeconds" -}}
{{- sub (int .Values.engine.terminationGraceSeconds) (add (int .Values.engine.preStopSeconds) 15) | max 0 -}}
{{- end -}}

{{/* The engine's own, then the server's drain, and half a minute to end calls and the catalogue. */}}
{{- define "slotstream.sidecar.graceSeconds" -}}
{{- add (int .Values.engine.terminationGraceSeconds) (ceil .Values.server.drainSeconds | int) 30 -}}
{{- end -}}
